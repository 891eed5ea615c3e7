"""Backward of the routed experts: all rows at once for the rows, chunk by chunk for the weights.

    h = SwiGLU(x W_gu),  y = sum_e g_e h_e W_down:
    u = dy W_down^T;  dg = u . h;  dh = g u;  dpre = SwiGLU'(dh);  dx = dpre W_gu^T
    dW_down = (g h)^T dy;  dW_gu = x^T dpre

Expert outputs are not needed: `dg` is taken before the last product. Rows are sorted by expert, in
the order of the batch within one, so that the rows of a chunk of one sequence lie together. A chunk
gives a leaf to the experts that it used and to no others: what is absent from an expert's tree adds
no node to it, so an expert without rows costs nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model.moe import Moe, Sorted, add_slots, sort_by_expert, take_rows
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.primitives import swiglu
from glm_jax.training import accumulate
from glm_jax.training.accumulate import Counter
from glm_jax.training.pack import TrainBatch
from glm_jax.training.tape import Factors, leaf

LEAF_ROWS = 64
"""Rows of one expert in one chunk that a product takes at once; more take more products."""


class ExpertRows(NamedTuple):
    """Factors of the experts' weight gradients, rows sorted by expert (and spare ones)."""

    x_MD: Array
    d_pre_MG: Array
    hidden_MF: Array
    """Gated."""
    d_out_MD: Array
    order: Sorted


def rows_vjp(
    layer: Moe,
    ops: Arithmetic,
    y_RD: Float[Array, "R D"],
    ids_Rk: Int[Array, "R k"],
    gates_Rk: Float[Array, "R k"],
    used_R: Bool[Array, "R"],
    d_out_RD: Float[Array, "R D"],
) -> tuple[Array, Array, ExpertRows]:
    """Derivatives of the rows `[R, D]` and gates `[R, k]`, and the factors of the weights'."""
    (n_rows, k), n_experts = ids_Rk.shape, layer.cfg.n_routed_experts
    tile = ops.expert_tile(n_rows * k // n_experts)
    order = sort_by_expert(ids_Rk, used_R, n_experts, tile)
    gate_up_EDG = layer.gate_up[...].reshape(n_experts, y_RD.shape[1], -1)
    down_EFD = layer.down[...]
    spare = max(tile, LEAF_ROWS)
    x_MD = take_rows(y_RD, order.order_M, k, spare)
    d_MD = take_rows(d_out_RD, order.order_M, k, spare)
    gate_M = jnp.pad(gates_Rk.reshape(-1)[order.order_M], (0, spare))
    n, width, plan = x_MD.shape[0], down_EFD.shape[1], order.plan

    def body(i, carry):
        start, e = plan.start_of_tile[i], plan.group_of_tile[i]

        def rows(a):
            return lax.dynamic_slice_in_dim(a, start, tile, 0)

        def weight(a):
            return lax.dynamic_index_in_dim(a, e, 0, keepdims=False)

        gate_up_DG, down_FD, gate_R1 = weight(gate_up_EDG), weight(down_EFD), rows(gate_M)[:, None]
        pre_RG = ops.product(rows(x_MD), gate_up_DG).astype(y_RD.dtype)
        hidden_RF, pull = jax.vjp(lambda pre: swiglu(pre.reshape(tile, 2, width)), pre_RG)
        u_RF = ops.product(rows(d_MD), down_FD.T)
        hidden32_RF = hidden_RF.astype(jnp.float32)
        d_gate_R = ops.row_sum(u_RF * hidden32_RF)[:, 0]
        (d_pre_RG,) = pull((gate_R1 * u_RF).astype(hidden_RF.dtype))
        d_x_RD = ops.product(d_pre_RG, gate_up_DG.T).astype(y_RD.dtype)
        new = (d_x_RD, d_gate_R, d_pre_RG, (gate_R1 * hidden32_RF).astype(y_RD.dtype))
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, 0), carry, new
        )

    def zeros(*shape):
        return jnp.zeros((n, *shape), y_RD.dtype)

    d_gate_M = jnp.zeros(n, jnp.float32)
    start = (zeros(y_RD.shape[1]), d_gate_M, zeros(2 * width), zeros(width))
    d_x_MD, d_gate_M, d_pre_MG, hidden_MF = lax.fori_loop(0, plan.n_tiles, body, start)
    used_R1 = used_R[:, None]
    d_y_RD = jnp.where(used_R1, add_slots(d_x_MD, order.place_M, n_rows), 0)
    d_gates_Rk = jnp.where(used_R1, d_gate_M[order.place_M].reshape(n_rows, k), 0.0)
    return d_y_RD, d_gates_Rk, ExpertRows(x_MD, d_pre_MG, hidden_MF, d_MD, order)


def push_leaves(
    rows: ExpertRows,
    train: TrainBatch,
    ids_Rk: Int[Array, "R k"],
    counter: Counter,
    layer: Int[Array, ""],
) -> Counter:
    """Adds one leaf a chunk and expert that it used, chunks ascending.

    Args:
        rows: from `rows_vjp` for the whole batch.
        train: gives the chunks.
        ids_Rk: the routes.
        counter: sums so far, a place a layer and expert `[L, E]`.
        layer: number of the layer among the L.
    """
    n_experts = counter.last.shape[1]
    mine_RE = jnp.zeros((ids_Rk.shape[0], n_experts), jnp.int32)
    for slot in range(ids_Rk.shape[1]):
        chosen = ids_Rk[:, slot, None] == jnp.arange(n_experts, dtype=ids_Rk.dtype)[None, :]
        mine_RE = mine_RE + (chosen & train.batch.valid_T[:, None]).astype(jnp.int32)
    before_RE = jnp.pad(jnp.cumsum(mine_RE, axis=0), ((1, 0), (0, 0)))
    first_nE = before_RE[train.start_n]
    n_nE = before_RE[train.start_n + train.length_n] - first_nE
    counts_E = before_RE[-1]
    row_nE = (jnp.cumsum(counts_E) - counts_E)[None, :] + first_nE
    real_n1 = jnp.arange(n_nE.shape[0])[:, None] < train.n_chunks
    size_p = jnp.where(real_n1, n_nE, 0).reshape(-1)
    # Pairs of chunk and expert that have rows come first, in order.
    pair_p = jnp.argsort(size_p == 0, stable=True)
    n_pairs = jnp.sum(size_p > 0, dtype=jnp.int32)

    def body(i, counter):
        pair = pair_p[i]
        expert = (pair % n_experts).astype(jnp.int32)
        parts = _leaves(rows, row_nE.reshape(-1)[pair], size_p[pair])
        return accumulate.push(counter, train.index_n[pair // n_experts], parts, (layer, expert))

    return lax.fori_loop(0, n_pairs, body, counter)


def _leaves(rows: ExpertRows, start: Array, n: Array) -> dict[str, Array]:
    """Gradients of one expert's weights over `n` sorted rows from `start` on, tiles ascending."""

    def part(i):
        at = start + i * LEAF_ROWS
        mine_R1 = (i * LEAF_ROWS + jnp.arange(LEAF_ROWS, dtype=jnp.int32) < n)[:, None]

        def cut(a):
            a = lax.dynamic_slice_in_dim(a, at, LEAF_ROWS, 0)
            return jnp.where(mine_R1, a, jnp.zeros((), a.dtype))

        gate_up = Factors(cut(rows.x_MD), cut(rows.d_pre_MG))
        down = Factors(cut(rows.hidden_MF), cut(rows.d_out_MD))
        shapes = [(f.x_R.shape[1], f.dy_R.shape[1]) for f in (gate_up, down)]
        d_gate_up_DG, d_down = leaf(gate_up, shapes[0], False), leaf(down, shapes[1], False)
        return {"gate_up": d_gate_up_DG, "down": d_down}

    def more(i, sums):
        return jax.tree.map(jnp.add, sums, part(i))

    return lax.fori_loop(1, (n + LEAF_ROWS - 1) // LEAF_ROWS, more, part(jnp.int32(0)))
