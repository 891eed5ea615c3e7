"""Fixed-order XLA twin; its functions of a block of the vocabulary are the TPU kernel's too."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pinned_matmul.order import Order
from pallas_kernels.pinned_matmul.xla import contract
from pallas_kernels.row_sum import rounded, row_sum

LANES = 16
"""Columns that carry the old maximum beside a block: a full vector of every CPU."""


class Carry(NamedTuple):
    """What a row has seen so far."""

    peak_R1: jax.Array
    total_RL: jax.Array
    """Sum of exp(logit - peak), in equal columns: full vectors for the final log."""
    target_R1: jax.Array
    """The target's logit."""
    top_Rn: jax.Array | None
    """Largest logits, descending."""
    ids_Rn: jax.Array | None
    """Their ids, in f32: exact below 2^24, and what every unit of a TPU reduces."""


def start(n_rows: int, top: int) -> Carry:
    """Before the first block."""

    def full(width, value):
        return jnp.full((n_rows, width), value, jnp.float32)

    return Carry(
        full(1, jnp.finfo(jnp.float32).min),
        full(LANES, 0.0),
        full(1, -jnp.inf),
        full(top, -jnp.inf) if top else None,
        full(top, 0.0) if top else None,
    )


def add_block(
    carry: Carry,
    logit_RB: jax.Array,
    first: jax.Array | int,
    counted: jax.Array | int,
    target_R1: jax.Array,
) -> Carry:
    """Joins the logits of the ids from `first` on; those below `counted` were there before."""
    id_RB = first + lax.broadcasted_iota(jnp.int32, logit_RB.shape, 1)
    logit_RB = jnp.where(id_RB >= counted, logit_RB, -jnp.inf)
    peak_R1 = jnp.maximum(carry.peak_R1, jnp.max(logit_RB, axis=1, keepdims=True))
    # The old sum's factor stands as one more column beside the block, so that its exp is taken in
    # the same full vectors.
    last_RL = jnp.broadcast_to(carry.peak_R1, (logit_RB.shape[0], LANES))
    block = logit_RB.shape[1]
    weight = jnp.exp(jnp.concatenate([logit_RB, last_RL], axis=1) - peak_R1)
    total_RL = rounded(carry.total_RL * weight[:, block:]) + row_sum(weight[:, :block])
    mine_R1 = jnp.max(jnp.where(id_RB == target_R1, logit_RB, -jnp.inf), axis=1, keepdims=True)
    top_Rn, ids_Rn = carry.top_Rn, carry.ids_Rn
    if top_Rn is not None and ids_Rn is not None:
        top_Rn, ids_Rn = _join(top_Rn, ids_Rn, logit_RB, id_RB.astype(jnp.float32))
    return Carry(peak_R1, total_RL, jnp.maximum(carry.target_R1, mine_R1), top_Rn, ids_Rn)


def _join(
    top_Rn: jax.Array, ids_Rn: jax.Array, logit_RB: jax.Array, id_RB: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The first n of both by (logit descending, id ascending); -0 = +0, NaN last.

    One after another: maximum and minimum give the same in any order, and a TPU kernel has no sort.
    """
    n_rows, n = top_Rn.shape
    # The block first, so that its columns stay where whole registers begin; what was there before
    # has the lower ids and so the lower places.
    pool = jnp.concatenate([logit_RB, top_Rn], axis=1)
    pool = jnp.where(jnp.isnan(pool), -jnp.inf, jnp.where(pool == 0.0, 0.0, pool))
    ids = jnp.concatenate([id_RB, ids_Rn], axis=1)
    column = lax.broadcasted_iota(jnp.int32, pool.shape, 1)
    place = jnp.where(column < logit_RB.shape[1], column + n, column - logit_RB.shape[1])
    place = place.astype(jnp.float32)
    rank_Rn = lax.broadcasted_iota(jnp.int32, (n_rows, n), 1)
    out, out_ids = jnp.zeros_like(top_Rn), jnp.zeros_like(ids_Rn)
    taken = jnp.full(pool.shape, -1.0, jnp.float32) > 0.0
    for i in range(n):
        left = jnp.where(taken, -jnp.inf, pool)
        best_R1 = jnp.max(left, axis=1, keepdims=True)
        first = jnp.where((left == best_R1) & ~taken, place, float(pool.shape[1]))
        chosen = place == jnp.min(first, axis=1, keepdims=True)
        id_R1 = jnp.max(jnp.where(chosen, ids, 0.0), axis=1, keepdims=True)
        out = jnp.where(rank_Rn == i, best_R1, out)
        out_ids = jnp.where(rank_Rn == i, id_R1, out_ids)
        taken = taken | chosen
    return out, out_ids


def finish(carry: Carry) -> tuple[jax.Array, ...]:
    """Log-probability of the target and log-sum-exp `[R, 1]`; with a top, its `[R, n]` and ids."""
    lse_R1 = carry.peak_R1 + jnp.log(carry.total_RL)[:, :1]
    found = (carry.target_R1 - lse_R1, lse_R1)
    if carry.top_Rn is None or carry.ids_Rn is None:
        return found
    return (*found, carry.top_Rn - lse_R1, carry.ids_Rn.astype(jnp.int32))


def score(
    hidden_RD: jax.Array,
    w_DV: jax.Array,
    target_R1: jax.Array,
    *,
    top: int,
    block: int,
    order: Order,
) -> tuple[jax.Array, ...]:
    """All rows at once, the vocabulary block by block; see `finish`."""
    n_ids = w_DV.shape[1]

    def body(j, carry):
        # The last block may reach back into the one before: each id counts once.
        first = jnp.minimum(j * block, n_ids - block)
        w_DB = lax.dynamic_slice_in_dim(w_DV, first, block, 1)
        logit_RB = contract(hidden_RD, w_DB, order)
        return add_block(carry, logit_RB, first, j * block, target_R1)

    carry = start(hidden_RD.shape[0], top)
    return finish(lax.fori_loop(0, -(-n_ids // block), body, carry))
