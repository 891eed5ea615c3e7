"""Drawing tokens inside the jitted step.

    z = logits / temperature;  token = argmax over kept v of (z_v + G_v),   G = -log(-log(u))

`u` comes from a counter-based generator keyed by (seed, sample, position), so a token depends on
its request alone. All float work is done in the row tiles of the forward, over a vocabulary padded
to whole vectors: XLA's exp and log round differently in the tail of a vector.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from glm_jax.head import WORD, Shaping, score
from glm_jax.model import GlmModel
from glm_jax.numerics.arithmetic import Arithmetic
from pallas_kernels.top_k_select import select_mask

LANES = 64
"""The vocabulary is padded to a multiple of this."""
BITS_OF_ONE = 0x3F800000


class Rows(NamedTuple):
    """What the draw of each row depends on, beside the logits and the place."""

    temperature_R: Float[Array, "R"]
    """0: greedy."""
    top_k_R: Int[Array, "R"]
    """The vocabulary's size keeps all."""
    top_p_R: Float[Array, "R"]
    min_p_R: Float[Array, "R"]
    min_tokens_R: Int[Array, "R"]
    stop_Rs: Int[Array, "R s"]
    """Stop ids; -1 where there are fewer."""
    seed_R: UInt32[Array, "R"]
    sample_R: Int[Array, "R"]


class Drawn(NamedTuple):
    """What was drawn in each row."""

    token_R: Int[Array, "R"]
    logprob_R: Float[Array, "R"]
    sampling_logprob_R: Float[Array, "R"]
    kept_RW: UInt32[Array, "R W"]
    top_ids_Rn: Int[Array, "R n"]
    top_logprobs_Rn: Float[Array, "R n"]


def draw(
    model: GlmModel,
    ops: Arithmetic,
    hidden_RD: Float[Array, "R D"],
    rows: Rows,
    position_R: Int[Array, "R"],
    generated_R: Int[Array, "R"],
    n_used: Int[Array, ""],
    *,
    top: int,
) -> Drawn:
    """Draws a token in each of the first `n_used` rows.

    Args:
        model: its head is used.
        ops: the arithmetic of the forward.
        hidden_RD: after the final norm; whole tiles.
        rows: settings of each row.
        position_R: position that the drawn token will have.
        generated_R: tokens that its sample has drawn before it.
        n_used: rows that matter.
        top: most likely ids to return.
    """
    none_R = jnp.zeros(hidden_RD.shape[0], jnp.int32)
    scores = score(model, ops, hidden_RD, none_R, n_used, top=top, logits=True)
    assert scores.logits_TV is not None
    greedy_R = rows.temperature_R == 0.0
    temperature_R = jnp.where(greedy_R, 1.0, rows.temperature_R)

    def region(logits_RV, temperature_R, rows, position_R, generated_R):
        return _draw_rows(ops, logits_RV, temperature_R, rows, position_R, generated_R)

    args = (scores.logits_TV, temperature_R, rows, position_R, generated_R)
    token_R, kept_RW = ops.rows(region, n_used, *args, exponential=True)
    logit_R = jnp.take_along_axis(scores.logits_TV, token_R[:, None], axis=1)[:, 0]
    logprob_R = logit_R - scores.lse_T

    def shaped(_):
        shaping = Shaping(temperature_R, kept_RW)
        return score(model, ops, hidden_RD, token_R, n_used, shaping=shaping).target_T

    few_R = _filters(rows, scores.logits_TV.shape[1]) | (generated_R < rows.min_tokens_R)
    alters_R = (temperature_R != 1.0) | (few_R & ~greedy_R)
    used_R = jnp.arange(hidden_RD.shape[0], dtype=jnp.int32) < n_used
    sampling_R = lax.cond(jnp.any(alters_R & used_R), shaped, lambda _: logprob_R, None)
    return Drawn(token_R, logprob_R, sampling_R, kept_RW, scores.top_ids_Tn, scores.top_logprobs_Tn)


def _filters(rows: Rows, width: int) -> Bool[Array, "R"]:
    """Which rows have a filter (`min_tokens` apart)."""
    return (rows.top_k_R < width) | (rows.top_p_R < 1.0) | (rows.min_p_R > 0.0)


def _draw_rows(ops, logits_RV, temperature_R, rows: Rows, position_R, generated_R):
    width = logits_RV.shape[1]
    z_RV = logits_RV / temperature_R[:, None]
    z_RV = jnp.pad(z_RV, ((0, 0), (0, -width % LANES)), constant_values=-jnp.inf)
    id_1V = jnp.arange(z_RV.shape[1], dtype=jnp.int32)[None, :]
    early_R = generated_R < rows.min_tokens_R

    def without_stops(_):
        stop_RV = jnp.any(rows.stop_Rs[:, :, None] == id_1V[:, None, :], axis=1)
        return (id_1V < width) & ~(stop_RV & early_R[:, None])

    def everything(_):
        return jnp.broadcast_to(id_1V < width, z_RV.shape)

    kept_RV = lax.cond(jnp.any(early_R), without_stops, everything, None)
    z_RV = jnp.where(kept_RV, z_RV, -jnp.inf)
    greedy_R = rows.temperature_R == 0.0
    some_R = _filters(rows, width) & ~greedy_R
    kept_RV = lax.cond(
        jnp.any(some_R),
        lambda _: kept_RV & (_filter(ops, z_RV, rows) | ~some_R[:, None]),
        lambda _: kept_RV,
        None,
    )
    noisy_RV = jnp.where(kept_RV, z_RV + _gumbel(rows, position_R, z_RV.shape[1]), -jnp.inf)
    token_R = _first_of_the_largest(jnp.where(greedy_R[:, None], z_RV, noisy_RV), id_1V)
    return token_R, _pack(kept_RV | greedy_R[:, None], width)


def _first_of_the_largest(x_RV: Array, id_1V: Array) -> Int[Array, "R"]:
    """`argmax`, whose reduction of pairs XLA does not vectorise on a CPU. A row with NaN gets 0."""
    largest_RV = x_RV == jnp.max(x_RV, axis=1, keepdims=True)
    n_ids = x_RV.shape[1]
    id_R = jnp.min(jnp.where(largest_RV, id_1V, n_ids), axis=1)
    return jnp.where(id_R == n_ids, 0, id_R)


def _filter(ops: Arithmetic, z_RV: Array, rows: Rows) -> Bool[Array, "R V"]:
    """Rules 2 to 4 of `SamplingParams`; what is dropped already stands at -inf."""
    kept_RV = select_mask(z_RV, rows.top_k_R)
    peak_R1 = jnp.max(z_RV, axis=1, keepdims=True)
    weight_RV = jnp.where(kept_RV, jnp.exp(z_RV - peak_R1), 0.0)
    bits_RV = lax.bitcast_convert_type(weight_RV, jnp.int32)

    def mass(mask_RV):
        return ops.row_sum(jnp.where(mask_RV, weight_RV, 0.0))[:, 0]

    bound_R = rows.top_p_R * mass(kept_RV)

    def halve(_, ends):
        # The ids above `high` hold less than the bound, those above `low` do not.
        low_R, high_R = ends
        middle_R = low_R + (high_R - low_R) // 2
        less_R = mass(bits_RV > middle_R[:, None]) < bound_R
        return jnp.where(less_R, low_R, middle_R), jnp.where(less_R, middle_R, high_R)

    # Weights are 0 to 1, where the order of floats is that of their bits.
    low_R, high_R = jnp.full_like(rows.top_k_R, -1), jnp.full_like(rows.top_k_R, BITS_OF_ONE)
    _, least_R = lax.fori_loop(0, BITS_OF_ONE.bit_length(), halve, (low_R, high_R))
    likely_RV = (bits_RV >= least_R[:, None]) | (rows.top_p_R >= 1.0)[:, None]
    return kept_RV & likely_RV & (weight_RV >= rows.min_p_R[:, None])


def _gumbel(rows: Rows, position_R: Array, width: int) -> Float[Array, "R V"]:
    def bits(seed, sample, position):
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return jax.random.bits(key, (width,), jnp.uint32)

    bits_RV = jax.vmap(bits)(rows.seed_R, rows.sample_R, position_R)
    # 23 bits and a half: every value is exact, and 0 and 1 cannot occur.
    half_RV = (bits_RV >> 9).astype(jnp.float32) + 0.5
    return -jnp.log(-jnp.log(half_RV * jnp.float32(2.0**-23)))


def _pack(kept_RV: Bool[Array, "R V"], width: int) -> UInt32[Array, "R W"]:
    n_words = -(-width // WORD)
    kept_RV = kept_RV[:, : n_words * WORD] & (jnp.arange(n_words * WORD) < width)[None, :]
    bit_RWb = kept_RV.reshape(-1, n_words, WORD).astype(jnp.uint32)
    shift_b = jnp.arange(WORD, dtype=jnp.uint32)[None, None, :]
    return jnp.sum(bit_RWb << shift_b, axis=2, dtype=jnp.uint32)
