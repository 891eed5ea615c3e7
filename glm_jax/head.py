"""The head region: log-probabilities, logits and the most likely tokens, from one arithmetic.

    logprob(t) = logit_t - (m + log sum_v exp(logit_v - m)),   m = max_v logit_v

The vocabulary is read in blocks, ascending; the maximum and the sum are carried from block to
block, so that tokens x vocabulary is never held unless the logits themselves are asked for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from glm_jax.model import GlmModel
from glm_jax.numerics.arithmetic import Arithmetic, native
from pallas_kernels.row_sum import rounded

LANES = 16
"""Columns that carry the old maximum beside a block: a full vector of every CPU."""


WORD = 32
"""Vocabulary entries a word of `Shaping.kept_TW` speaks of."""


class Shaping(NamedTuple):
    """The distribution that a token is sampled from, where it is not the model's own.

    Sampler and trainer score it by the same region, so that a ratio of their probabilities is
    exactly 1 under any temperature and filter.
    """

    temperature_T: Float[Array | np.ndarray, "T"]
    """Logits are divided by it; 1 changes no bit. Never 0: greedy choice has no distribution."""
    kept_TW: UInt32[Array | np.ndarray, "T W"] | None = None
    """Bit v % 32 of word v // 32 says that id v may be sampled; W = ceil(V / 32). None: all may."""


class Scores(NamedTuple):
    """What the head says of each row."""

    target_T: Float[Array, "T"]
    """Log-probability of the row's target."""
    lse_T: Float[Array, "T"]
    """log sum exp of the row's logits; logits minus it are the log-probabilities."""
    top_logprobs_Tn: Float[Array, "T n"]
    """Largest log-probabilities, descending; ties to the lower id."""
    top_ids_Tn: Int[Array, "T n"]
    logits_TV: Float[Array, "T V"] | None
    """All logits, if asked for."""


class _Carry(NamedTuple):
    peak_R: Array
    total_RL: Array
    """Equal columns, for full vectors in the final log."""
    target_R: Array
    top_Rn: Array
    ids_Rn: Array
    logits_RV: Array | None


def score(
    model: GlmModel,
    ops: Arithmetic,
    hidden_TD: Float[Array, "T D"],
    targets_T: Int[Array, "T"],
    n_used: Int[Array, ""],
    *,
    top: int = 0,
    logits: bool = False,
    shaping: Shaping | None = None,
) -> Scores:
    """Scores the first `n_used` rows.

    Args:
        model: its head is used.
        ops: the arithmetic of the forward that made `hidden`.
        hidden_TD: after the final norm.
        targets_T: token ids whose log-probability is wanted.
        n_used: rows that matter.
        top: how many of the most likely tokens to return.
        logits: also return all logits (for sampling: a few rows only).
        shaping: score the distribution under a temperature and a kept set instead of the model's
            own; everything returned is then of that one. An id that is not kept has -inf.
    """

    def region(hidden_RD, target_R, shaping_R):
        return _score_rows(model, ops, hidden_RD, target_R, shaping_R, top, logits)

    n_rows = hidden_TD.shape[0]
    extra = ops.bucket(n_rows) - n_rows
    args = (hidden_TD, targets_T, shaping)
    if extra:
        args = jax.tree.map(lambda x: jnp.pad(x, ((0, extra),) + ((0, 0),) * (x.ndim - 1)), args)
    scores = ops.rows(region, n_used, *args, exponential=True)
    return jax.tree.map(lambda x: x[:n_rows], scores) if extra else scores


def token_logprobs(
    model: GlmModel,
    hidden_TD: Float[Array, "T D"],
    targets_T: Int[Array, "T"],
    ops: Arithmetic | None = None,
) -> Float[Array, "T"]:
    """Log p(target) of every row, f32; in native arithmetic unless told otherwise."""
    n_used = jnp.asarray(hidden_TD.shape[0], jnp.int32)
    return score(model, ops or native(), hidden_TD, targets_T, n_used).target_T


def shape_logits(logit_RB: Array, id_B: Array, shaping: Shaping | None) -> Array:
    """Logits of the ids `id_B` under a temperature and a kept set; as they are without one."""
    if shaping is None:
        return logit_RB
    shaped_RB = logit_RB / shaping.temperature_T[:, None]
    if shaping.kept_TW is None:
        return shaped_RB
    bit_1B = (id_B % WORD).astype(jnp.uint32)[None, :]
    kept_RB = (shaping.kept_TW[:, id_B // WORD] >> bit_1B) & jnp.uint32(1) == 1
    return jnp.where(kept_RB, shaped_RB, -jnp.inf)


def _score_rows(model, ops, hidden_RD, target_R, shaping_R, top, logits) -> Scores:
    n_rows, width = hidden_RD.shape[0], model.cfg.vocab_size
    block = min(ops.contract.vocab_block, width)
    w_DV = model.lm_head[...]

    def body(j, carry: _Carry) -> _Carry:
        start = jnp.minimum(j * block, width - block)
        w_DB = lax.dynamic_slice_in_dim(w_DV, start, block, 1)
        id_B = start + jnp.arange(block, dtype=jnp.int32)
        raw_RB = shape_logits(ops.product(hidden_RD, w_DB), id_B, shaping_R)
        # The last block may reach back into the one before: each column counts once.
        logit_RB = jnp.where((id_B >= j * block)[None, :], raw_RB, -jnp.inf)
        peak_R = lax.stop_gradient(jnp.maximum(carry.peak_R, jnp.max(logit_RB, axis=1)))
        # The old sum's factor stands as one more column beside the block, so that its exp is taken
        # in the same full vectors.
        last_RL = jnp.broadcast_to(carry.peak_R[:, None], (n_rows, LANES))
        weight = jnp.exp(jnp.concatenate([logit_RB, last_RL], axis=1) - peak_R[:, None])
        old_RL = rounded(carry.total_RL * weight[:, block:])
        total_RL = old_RL + ops.row_sum(weight[:, :block])
        mine_RB = id_B[None, :] == target_R[:, None]
        target = jnp.max(jnp.where(mine_RB, logit_RB, -jnp.inf), axis=1)
        top_Rn, ids_Rn = carry.top_Rn, carry.ids_Rn
        if top:
            # Earlier blocks come first, so `top_k` prefers the lower id among equals.
            pool_Rm = jnp.concatenate([top_Rn, logit_RB], axis=1)
            pool_ids = jnp.broadcast_to(id_B[None, :], (n_rows, block))
            top_Rn, pick_Rn = lax.top_k(pool_Rm, top)
            ids_Rn = jnp.take_along_axis(
                jnp.concatenate([ids_Rn, pool_ids], axis=1), pick_Rn, axis=1
            )
        all_RV = carry.logits_RV
        if all_RV is not None:
            all_RV = lax.dynamic_update_slice_in_dim(all_RV, raw_RB, start, 1)
        target_logit_R = jnp.maximum(carry.target_R, target)
        return _Carry(peak_R, total_RL, target_logit_R, top_Rn, ids_Rn, all_RV)

    low_R = jnp.full(n_rows, -jnp.inf, jnp.float32)
    start = _Carry(
        jnp.full(n_rows, jnp.finfo(jnp.float32).min, jnp.float32),
        jnp.zeros((n_rows, LANES), jnp.float32),
        low_R,
        jnp.full((n_rows, top), -jnp.inf, jnp.float32),
        jnp.zeros((n_rows, top), jnp.int32),
        jnp.zeros((n_rows, width), jnp.float32) if logits else None,
    )
    end = lax.fori_loop(0, -(-width // block), body, start)
    lse_R = end.peak_R + jnp.log(end.total_RL)[:, 0]
    return Scores(
        end.target_R - lse_R, lse_R, end.top_Rn - lse_R[:, None], end.ids_Rn, end.logits_RV
    )
