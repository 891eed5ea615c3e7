"""Fixed twin: the selection that the model runs on a CPU, as a mask and as ids."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32


def order_key(scores: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Maps f32 scores to uint32 so that a larger score is a larger integer."""
    if scores.dtype != jnp.float32:
        raise TypeError(f"scores: dtype {scores.dtype}; selection is defined on float32 scores")
    # `scores + 0.0` would be removed under jit; a select is not.
    scores = jnp.where(scores == 0.0, 0.0, scores)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))


def select_mask(scores_TS: Float[Array, "T S"], k: int | Int[Array, "T"]) -> Bool[Array, "T S"]:
    """Marks the `k` first entries of each row; all of them where `S <= k`.

    `k` may differ by row; a row of a traced `k` below 1 is marked as if it were 1.

    Bisects the bits of the k-th largest key, then, only if some row has a tie at that key, the
    index up to which tied entries are taken. O(32 T S) compares, no sort.
    """
    n_tokens, n_keys = scores_TS.shape
    if isinstance(k, int):
        if k < 1:
            raise ValueError(f"k: {k}; at least one entry must be selected")
        if n_keys <= k:
            return jnp.ones((n_tokens, n_keys), bool)
    else:
        k = jnp.clip(k, 1, n_keys)
    key_TS = order_key(scores_TS)

    def count(mask_TS):
        return jnp.sum(mask_TS, axis=-1, dtype=jnp.int32)

    def refine(carry):
        bit, threshold_T, at_least_T = carry
        trial_T = threshold_T | (jnp.uint32(1) << bit.astype(jnp.uint32))
        count_T = count(key_TS >= trial_T[:, None])
        keep_T = count_T >= k
        return (
            bit - 1,
            jnp.where(keep_T, trial_T, threshold_T),
            jnp.where(keep_T, count_T, at_least_T),
        )

    def unfinished(carry):
        bit, _, at_least_T = carry
        return (bit >= 0) & jnp.any(at_least_T != k)

    start = (jnp.int32(31), jnp.zeros(n_tokens, jnp.uint32), jnp.full(n_tokens, n_keys, jnp.int32))
    _, threshold_T, at_least_T = lax.while_loop(unfinished, refine, start)
    at_least_TS = key_TS >= threshold_T[:, None]

    def break_ties(_):
        tied_TS = key_TS == threshold_T[:, None]
        need_T = k - count(key_TS > threshold_T[:, None])
        index_S = jnp.arange(n_keys, dtype=jnp.int32)

        def grow(i, end_T):
            trial_T = end_T + (jnp.int32(1) << (n_bits - 1 - i))
            taken_T = count(tied_TS & (index_S[None, :] < trial_T[:, None]))
            return jnp.where(taken_T <= need_T, trial_T, end_T)

        n_bits = n_keys.bit_length()
        end_T = lax.fori_loop(0, n_bits, grow, jnp.zeros(n_tokens, jnp.int32))
        surplus_TS = tied_TS & (index_S[None, :] >= end_T[:, None])
        # A row that ended early holds exactly k entries at or above its threshold.
        return at_least_TS & ~(surplus_TS & (at_least_T != k)[:, None])

    return lax.cond(jnp.any(at_least_T != k), break_ties, lambda _: at_least_TS, None)


def mask_to_ids(mask_TS: Bool[Array, "T S"], k: int) -> Int[Array, "T k"]:
    """Column numbers of the marked entries, ascending, padded at the end with `S`."""
    n_tokens, n_keys = mask_TS.shape
    rank_TS = jnp.cumsum(mask_TS.astype(jnp.int32), axis=-1) - 1
    slot_TS = jnp.where(mask_TS & (rank_TS < k), rank_TS, k)
    column_TS = lax.broadcasted_iota(jnp.int32, (n_tokens, n_keys), 1)
    row_TS = lax.broadcasted_iota(jnp.int32, (n_tokens, n_keys), 0)
    padded_Tk = jnp.full((n_tokens, k), n_keys, jnp.int32)
    # Each (row, slot) is written at most once, so the scatter has no order to depend on.
    return padded_Tk.at[row_TS, slot_TS].set(column_TS, mode="drop")
