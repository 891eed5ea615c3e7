"""Drawing tokens inside the jitted step.

    z = logits / temperature;  token = argmax over kept v of (z_v + G_v),   G = -log(-log(u))

`u` comes from a counter-based generator keyed by (seed, sample, position), so a token depends on
its request alone. All of it runs in tiles of one fixed size: XLA's exp and log round differently in
the tail of a vector, and a tile that follows the batch would move that tail.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from glm_jax.head import WORD, Shaping, score
from glm_jax.model import GlmModel
from glm_jax.numerics.arithmetic import Arithmetic

TILE = 8
"""Rows drawn at once."""
LANES = 64
"""The vocabulary is padded to a multiple of this."""


class Rows(NamedTuple):
    """What the draw of each row depends on."""

    temperature_R: Float[Array, "R"]
    """1 for greedy rows."""
    greedy_R: Bool[Array, "R"]
    top_p_R: Float[Array, "R"]
    top_k_R: Int[Array, "R"]
    """The vocabulary's size keeps all."""
    min_p_R: Float[Array, "R"]
    seed_R: UInt32[Array, "R"]
    sample_R: Int[Array, "R"]
    min_tokens_R: Int[Array, "R"]
    stop_Rs: Int[Array, "R s"]
    """Stop ids; -1 where there are fewer."""


class Drawn(NamedTuple):
    """What was drawn in each row."""

    token_R: Int[Array, "R"]
    logprob_R: Float[Array, "R"]
    sampling_logprob_R: Float[Array, "R"]
    kept_RW: UInt32[Array, "R W"] | None
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
    shaped: bool,
    filtered: bool,
    top: int,
) -> Drawn:
    """Draws a token a row.

    Args:
        model: its head is used.
        ops: the arithmetic of the forward.
        hidden_RD: after the final norm.
        rows: settings of each row.
        position_R: position that the drawn token will have.
        generated_R: tokens drawn before it.
        n_used: rows that matter.
        shaped: some row has a temperature or filters (static; else that work is left out).
        filtered: some row has filters.
        top: most likely ids to return.
    """
    none_R = jnp.zeros(hidden_RD.shape[0], jnp.int32)
    scores = score(model, ops, hidden_RD, none_R, n_used, top=top, logits=True)
    logits_RV = scores.logits_TV
    assert logits_RV is not None

    def region(logits_RV, rows, position_R, generated_R):
        return _draw_tile(logits_RV, rows, position_R, generated_R, filtered)

    token_R, kept_RW = _in_tiles(region, n_used, logits_RV, rows, position_R, generated_R)
    logit_R = jnp.take_along_axis(logits_RV, token_R[:, None], axis=1)[:, 0]
    logprob_R = sampling_R = logit_R - scores.lse_T
    if shaped:
        shaping = Shaping(rows.temperature_R, kept_RW)
        own_R = rows.temperature_R == 1.0
        if kept_RW is not None:
            own_R = own_R & jnp.all(kept_RW == jnp.uint32(0xFFFFFFFF), axis=1)
        again = score(model, ops, hidden_RD, token_R, n_used, shaping=shaping)
        sampling_R = jnp.where(own_R, logprob_R, again.target_T)
    return Drawn(token_R, logprob_R, sampling_R, kept_RW, scores.top_ids_Tn, scores.top_logprobs_Tn)


def _in_tiles(region: Any, n_used: Array, *args: Any) -> Any:
    """Applies a region to tiles of `TILE` rows."""
    n_rows = jax.tree.leaves(args)[0].shape[0]
    padded = -(-n_rows // TILE) * TILE

    def pad(x):
        return jnp.pad(x, ((0, padded - n_rows),) + ((0, 0),) * (x.ndim - 1))

    args = jax.tree.map(pad, args)

    def tile(i):
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * TILE, TILE, 0), args)

    def body(i, out):
        new = region(*tile(i))
        return jax.tree.map(
            lambda o, n: lax.dynamic_update_slice_in_dim(o, n, i * TILE, 0), out, new
        )

    shapes = jax.eval_shape(lambda: region(*tile(0)))
    empty = jax.tree.map(lambda s: jnp.zeros((padded, *s.shape[1:]), s.dtype), shapes)
    out = lax.fori_loop(0, (n_used + TILE - 1) // TILE, body, empty)
    return jax.tree.map(lambda x: x[:n_rows], out)


def _draw_tile(logits_RV, rows: Rows, position_R, generated_R, filtered: bool):
    width = logits_RV.shape[1]
    padded = -(-width // LANES) * LANES
    z_RV = logits_RV / rows.temperature_R[:, None]
    z_RV = jnp.pad(z_RV, ((0, 0), (0, padded - width)), constant_values=-jnp.inf)
    kept_RV = _filter(z_RV, rows, generated_R, width) if filtered else None
    if kept_RV is not None:
        z_RV = jnp.where(kept_RV, z_RV, -jnp.inf)
    noise_RV = _gumbel(rows, position_R, padded)
    drawn_RV = jnp.where(rows.greedy_R[:, None], z_RV, z_RV + noise_RV)
    # argmax takes the first of equals: ties go to the lowest id.
    token_R = jnp.argmax(drawn_RV, axis=1).astype(jnp.int32)
    return token_R, None if kept_RV is None else _pack(kept_RV, width)


def _gumbel(rows: Rows, position_R: Array, width: int) -> Array:
    def bits(seed, sample, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)
        return jax.random.bits(key, (width,), jnp.uint32)

    bits_RV = jax.vmap(bits)(rows.seed_R, rows.sample_R, position_R)
    # 23 bits and a half: every value is exact, 0 and 1 cannot occur.
    half = (bits_RV >> 9).astype(jnp.float32) + 0.5
    return -jnp.log(-jnp.log(half * jnp.float32(2.0**-23)))


def _filter(z_RV: Array, rows: Rows, generated_R: Array, width: int) -> Array:
    """Which ids may be drawn: stop ids after `min_tokens`, then top-k, top-p, min-p."""
    id_V = jnp.arange(z_RV.shape[1], dtype=jnp.int32)
    early_R = generated_R < rows.min_tokens_R
    stop_RV = jnp.any(rows.stop_Rs[:, :, None] == id_V[None, None, :], axis=1)
    z_RV = jnp.where(stop_RV & early_R[:, None], -jnp.inf, z_RV)
    order_RV = jnp.argsort(-z_RV, axis=1, stable=True)  # ties: lower id first
    rank_RV = jnp.argsort(order_RV, axis=1)
    kept_RV = (rank_RV < rows.top_k_R[:, None]) & (z_RV > -jnp.inf)
    peak_R1 = jnp.max(z_RV, axis=1, keepdims=True)
    weight_RV = jnp.where(kept_RV, jnp.exp(z_RV - peak_R1), 0.0)
    sorted_RV = jnp.take_along_axis(weight_RV, order_RV, axis=1)
    before_RV = jnp.cumsum(sorted_RV, axis=1) - sorted_RV
    total_R1 = jnp.sum(sorted_RV, axis=1, keepdims=True)
    within_RV = before_RV < rows.top_p_R[:, None] * total_R1
    within_RV = jnp.take_along_axis(within_RV, rank_RV, axis=1)
    kept_RV = kept_RV & (within_RV | (rows.top_p_R >= 1.0)[:, None])
    kept_RV = kept_RV & (weight_RV >= rows.min_p_R[:, None])
    # A row without any filter keeps all of the vocabulary.
    free_R = (rows.top_k_R >= width) & (rows.top_p_R >= 1.0) & (rows.min_p_R == 0.0)
    free_RV = (free_R & ~(early_R & jnp.any(stop_RV, axis=1)))[:, None]
    return (kept_RV | free_RV) & (id_V < width)[None, :]


def _pack(kept_RV: Array, width: int) -> Array:
    """Bits by word; those past the vocabulary are set, so that a row that keeps all has all set."""
    id_V = jnp.arange(kept_RV.shape[1], dtype=jnp.int32)
    kept_RV = (kept_RV | (id_V >= width)[None, :])[:, : -(-width // WORD) * WORD]
    bit_RWb = kept_RV.reshape(kept_RV.shape[0], -1, WORD).astype(jnp.uint32)
    shift_b = jnp.arange(WORD, dtype=jnp.uint32)[None, None, :]
    return jnp.sum(bit_RWb << shift_b, axis=2, dtype=jnp.uint32)
