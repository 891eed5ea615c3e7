"""Backward of the routed experts, an expert at a time: first its rows, then its weights.

    h = SwiGLU(x W_gu),  y = sum_e g_e h_e W_down:
    u = dy W_down^T;  dg = u . h;  dh = g u;  dpre = SwiGLU'(dh);  dx = dpre W_gu^T
    dW_down = (g h)^T dy;  dW_gu = x^T dpre

Expert outputs are not needed: `dg` is taken before the last product. Rows are sorted by expert, in
the order of the batch within one, so that the rows of one sequence lie together. A leaf of an
expert's gradient tree is up to `token_leaf` of the rows that one sequence sent to it, at the index
`sequence * 2^13 + leaf`; what is absent adds no node, so an expert without rows costs nothing, and
one that a long sequence hardly uses has one leaf of it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm_jax.model.moe import Moe, add_slots, sort_by_expert, take_rows
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.primitives import swiglu
from glm_jax.training import accumulate
from glm_jax.training.accumulate import CHUNK_BITS, Counter
from glm_jax.training.pack import TrainBatch
from glm_jax.training.tape import rows_product
from pallas_kernels.grouped_matmul import GroupPlan


class Rows(NamedTuple):
    """What is known of the rows, sorted by expert (and spare ones)."""

    x_MD: Array
    d_out_MD: Array
    gate_M: Array


class Results(NamedTuple):
    """What is computed of the rows, in the same order."""

    d_x_MD: Array
    d_gate_M: Array
    x_DM: Array
    """`x` transposed: products over rows read it along M."""
    d_pre_MG: Array
    hidden_FM: Array
    """Gated, transposed."""


class Leaves(NamedTuple):
    """Leaves of the experts' weights: expert by expert, indices ascending within one."""

    start_p: Int[Array, "p"]
    """First row of each leaf among the sorted rows."""
    n_rows_p: Int[Array, "p"]
    index_p: Int[Array, "p"]
    """Place in the gradient tree."""
    end_E: Int[Array, "E"]
    """Number of the leaf after each expert's last."""


def experts_vjp(
    layer: Moe,
    ops: Arithmetic,
    train: TrainBatch,
    y_TD: Float[Array, "T D"],
    ids_Tk: Int[Array, "T k"],
    gates_Tk: Float[Array, "T k"],
    d_out_TD: Float[Array, "T D"],
    counter: Counter,
    number: Int[Array, ""],
) -> tuple[Array, Array, Counter]:
    """Derivatives of the rows `[T, D]` and gates `[T, k]`; adds the weights' to the counter.

    Args:
        layer: the experts.
        ops: the arithmetic, of one size of tile.
        train: the batch: what counts, and the chunks.
        y_TD: what the experts read.
        ids_Tk: chosen experts.
        gates_Tk: their weights.
        d_out_TD: derivative of the layer's output.
        counter: sums so far, a place a layer and expert `[L, E]`.
        number: number of the layer among the L.
    """
    (n_rows, k), n_experts = ids_Tk.shape, layer.cfg.n_routed_experts
    tile, n_leaf = ops.contract.backward_expert_tile, ops.contract.token_leaf
    valid_T = train.batch.valid_T
    order = sort_by_expert(ids_Tk, valid_T, n_experts, tile)
    spare = max(tile, n_leaf)
    rows = Rows(
        take_rows(y_TD, order.order_M, k, spare),
        take_rows(d_out_TD, order.order_M, k, spare),
        jnp.pad(gates_Tk.reshape(-1)[order.order_M], (0, spare)),
    )
    leaves = _leaves(train, ids_Tk, n_experts, n_leaf)
    gate_up_EDG = layer.gate_up[...].reshape(n_experts, y_TD.shape[1], -1)
    down_EFD, plan = layer.down[...], order.plan
    end_E = jnp.cumsum(-(-plan.counts_E // tile))
    used_E = jnp.argsort(plan.counts_E == 0, stable=True)

    def expert(i, carry):
        results, counter = carry
        e = used_E[i]

        def of(a):
            return lax.dynamic_index_in_dim(a, e, 0, keepdims=False)

        def before(end_E):
            return jnp.where(e > 0, end_E[e - 1], 0)

        # Sliced and transposed once an expert, not once a tile.
        weights = of(gate_up_EDG), of(down_EFD), of(gate_up_EDG).T, of(down_EFD).T
        tiles = before(end_E), end_E[e]
        results = _rows_vjp(ops, rows, results, weights, plan, tile, tiles)

        def leaf_of(p):
            factors = rows, results, leaves.start_p[p], leaves.n_rows_p[p]
            return leaves.index_p[p], _leaf(*factors, n_leaf)

        counter = accumulate.extend(
            counter, leaf_of, before(leaves.end_E), leaves.end_E[e], (number, e)
        )
        return results, counter

    n_used = jnp.sum(plan.counts_E > 0, dtype=jnp.int32)
    start = (_no_results(rows, down_EFD.shape[1]), counter)
    results, counter = lax.fori_loop(0, n_used, expert, start)
    valid_T1 = valid_T[:, None]
    d_y_TD = jnp.where(valid_T1, add_slots(results.d_x_MD, order.place_M, n_rows), 0)
    d_gates_Tk = results.d_gate_M[order.place_M].reshape(n_rows, k)
    return d_y_TD, jnp.where(valid_T1, d_gates_Tk, 0.0), counter


def _no_results(rows: Rows, width: int) -> Results:
    (n, d_model), dtype = rows.x_MD.shape, rows.x_MD.dtype
    return Results(
        jnp.zeros((n, d_model), dtype),
        jnp.zeros(n, jnp.float32),
        jnp.zeros((d_model, n), dtype),
        jnp.zeros((n, 2 * width), dtype),
        jnp.zeros((width, n), dtype),
    )


def _rows_vjp(
    ops: Arithmetic,
    rows: Rows,
    results: Results,
    weights: tuple[Array, Array, Array, Array],
    plan: GroupPlan,
    tile: int,
    tiles: tuple[Array, Array],
) -> Results:
    """Fills in the results of one expert's tiles.

    A tile that reaches past its expert writes rows of the next one too; those are written again by
    that one's own tiles, which come later.
    """
    gate_up_DG, down_FD, gate_up_GD, down_DF = weights
    width, dtype = down_FD.shape[0], rows.d_out_MD.dtype

    def body(i, results):
        start = plan.start_of_tile[i]

        def cut(a):
            return lax.dynamic_slice_in_dim(a, start, tile, 0)

        gate_R1, x_RD = cut(rows.gate_M)[:, None], cut(rows.x_MD)
        pre_RG = ops.product(x_RD, gate_up_DG).astype(dtype)
        hidden_RF, pull = jax.vjp(lambda pre: swiglu(pre.reshape(tile, 2, width)), pre_RG)
        u_RF = ops.product(cut(rows.d_out_MD), down_DF)
        hidden32_RF = hidden_RF.astype(jnp.float32)
        d_gate_R = ops.row_sum(u_RF * hidden32_RF)[:, 0]
        (d_pre_RG,) = pull((gate_R1 * u_RF).astype(hidden_RF.dtype))
        d_x_RD = ops.product(d_pre_RG, gate_up_GD).astype(dtype)
        hidden_FR = (gate_R1 * hidden32_RF).astype(dtype).T
        return Results(
            lax.dynamic_update_slice_in_dim(results.d_x_MD, d_x_RD, start, 0),
            lax.dynamic_update_slice_in_dim(results.d_gate_M, d_gate_R, start, 0),
            lax.dynamic_update_slice_in_dim(results.x_DM, x_RD.T, start, 1),
            lax.dynamic_update_slice_in_dim(results.d_pre_MG, d_pre_RG, start, 0),
            lax.dynamic_update_slice_in_dim(results.hidden_FM, hidden_FR, start, 1),
        )

    return lax.fori_loop(*tiles, body, results)


def _leaves(train: TrainBatch, ids_Tk: Int[Array, "T k"], n_experts: int, n_leaf: int) -> Leaves:
    """Cuts the rows of each expert and sequence in leaves."""
    chosen_TE = jnp.any(
        ids_Tk[:, :, None] == jnp.arange(n_experts, dtype=ids_Tk.dtype)[None, None, :], axis=1
    )
    mine_TE = (chosen_TE & train.batch.valid_T[:, None]).astype(jnp.int32)
    before_TE = jnp.pad(jnp.cumsum(mine_TE, axis=0), ((1, 0), (0, 0)))
    counts_E = before_TE[-1]
    # A sequence stands at its last chunk.
    number_n = jnp.arange(train.start_n.shape[0], dtype=jnp.int32)
    next_n = jnp.roll(train.origin_n, -1)
    last_n = (number_n == train.n_chunks - 1) | (next_n != train.origin_n)
    last_n = last_n & (number_n < train.n_chunks)
    first_nE = before_TE[train.origin_n]
    n_nE = before_TE[train.start_n + train.length_n] - first_nE
    n_p = jnp.where(last_n[:, None], n_nE, 0).T.reshape(-1)
    row_p = ((jnp.cumsum(counts_E) - counts_E)[None, :] + first_nE).T.reshape(-1)
    leaves_p = -(-n_p // n_leaf)
    end_p = jnp.cumsum(leaves_p)
    most = -(-ids_Tk.size // n_leaf) + n_p.shape[0]
    pair_q = jnp.repeat(
        jnp.arange(n_p.shape[0], dtype=jnp.int32), leaves_p, total_repeat_length=most
    )
    leaf_q = jnp.arange(most, dtype=jnp.int32) - (end_p - leaves_p)[pair_q]
    sequence_n = train.index_n >> CHUNK_BITS
    index_q = (sequence_n[pair_q % number_n.shape[0]] << CHUNK_BITS) + leaf_q
    past_q = leaf_q * n_leaf
    n_rows_q = jnp.minimum(n_p[pair_q] - past_q, n_leaf)
    return Leaves(row_p[pair_q] + past_q, n_rows_q, index_q, end_p.reshape(n_experts, -1)[:, -1])


def _leaf(rows: Rows, results: Results, start: Array, n: Array, n_leaf: int) -> dict[str, Array]:
    """Gradients of one expert's weights over `n` sorted rows from `start` on.

    The product takes the smallest of four widths that holds the rows: it follows from the leaf.
    """
    widths = sorted({-(-n_leaf * quarter // 4) for quarter in range(1, 5)})

    def over(width):
        mine_R = jnp.arange(width, dtype=jnp.int32) < n

        def cut(a, axis):
            part = lax.dynamic_slice_in_dim(a, start, width, axis)
            mine = jnp.expand_dims(mine_R, 1 - axis)
            return jnp.where(mine, part, jnp.zeros((), a.dtype))

        return {
            "gate_up": rows_product(cut(results.x_DM, 1), cut(results.d_pre_MG, 0)),
            "down": rows_product(cut(results.hidden_FM, 1), cut(rows.d_out_MD, 0)),
        }

    which = sum((n > width).astype(jnp.int32) for width in widths[:-1])
    return lax.switch(which, [functools.partial(over, width) for width in widths])
