"""Mosaic GPU kernels (Hopper) of the grouped product.

Forward and dx: rows are first copied to where each group starts a tile of its own (a move, which
rounds nothing); then a tile is one product of `pinned_matmul` with its group's matrix, and the
tiles that no row fell into are skipped. Weight gradient: leaves are the twin's tiles, counted from
the group's first row and added in ascending order.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.grouped_matmul.plan import plan_groups
from pallas_kernels.pinned_matmul import pallas_gpu as pinned
from pallas_kernels.pinned_matmul.order import Layout, Order

ROWS = pinned.ROWS
COLUMNS = 128
"""Columns of a tile of the weight gradient, its 64 rows a warpgroup."""


def forward(
    x_MK: jax.Array, w_EKN: jax.Array, plan, layout: Layout, order: Order, interpret: bool
) -> jax.Array:
    """`x @ w[group]` for layout `nn`, `x @ w[group]^T` for `nt`; rows of no group are undefined.

    Raises:
        KernelError: the dtype, a leaf or SMEM; see `pinned_matmul.pallas_gpu`.
    """
    pinned.check_dtype("grouped_matmul", x_MK.dtype)
    config = pinned.interpreted(_config(), order.k_leaf, interpret)
    start_n, end_n, group_n, n_tiles = _tiles(plan.counts_E, x_MK.shape[0], ROWS)
    rows_nt, _ = _rows(start_n, end_n, ROWS, x_MK.shape[0])
    groups = (group_n + plan.first, n_tiles[None])
    y = pinned.multiply(
        "grouped_matmul",
        x_MK[rows_nt.reshape(-1)],
        w_EKN,
        layout,
        order.k_leaf,
        x_MK.dtype.name,
        interpret,
        config,
        groups,
    )
    # Back again: each row is in the tile that counts it from its group's first row.
    row_M = jnp.arange(x_MK.shape[0], dtype=jnp.int32)
    row_end_E = jnp.cumsum(plan.counts_E).astype(jnp.int32)
    group_M = jnp.sum(row_end_E[None, :] <= row_M[:, None], axis=1, dtype=jnp.int32)
    group_M = jnp.minimum(group_M, plan.counts_E.shape[0] - 1)
    tiles_E = -(-plan.counts_E // ROWS)
    first_E = (jnp.cumsum(tiles_E) - tiles_E).astype(jnp.int32)
    place_M = first_E[group_M] * ROWS + row_M - (row_end_E - plan.counts_E)[group_M]
    return y[jnp.minimum(place_M, y.shape[0] - 1)]


def weight_gradient(
    x_MK: jax.Array, dy_MN: jax.Array, w_EKN: jax.Array, plan, tile: int, interpret: bool
) -> jax.Array:
    """See `xla.weight_gradient`; `tile` is the twin's rows a tile.

    Raises:
        KernelError: the dtype.
    """
    pinned.check_dtype("grouped_matmul", x_MK.dtype)
    n_groups = plan.counts_E.shape[0]
    # Rows of zeros add nothing: the twin's short tile is a whole one that ends in them.
    padded = -(-tile // ROWS) * ROWS
    start_n, end_n, _, _ = _tiles(plan.counts_E, x_MK.shape[0], tile)
    rows_nt, mine_nt = _rows(start_n, end_n, tile, x_MK.shape[0])

    def aligned(a, unit):
        # Rows of the next group (or spare rows) may hold anything: select, never multiply.
        rows = jnp.where(mine_nt[:, :, None], a[rows_nt], jnp.zeros((), a.dtype))
        pads = ((0, 0), (0, padded - tile), (0, -a.shape[1] % unit))
        return jnp.pad(rows, pads).reshape(-1, a.shape[1] + pads[2][1])

    x, dy = aligned(x_MK, ROWS), aligned(dy_MN, COLUMNS)
    tiles_E = (-(-plan.counts_E // tile)).astype(jnp.int32)
    first_E = (jnp.cumsum(tiles_E) - tiles_E).astype(jnp.int32)
    kernel = plgpu.kernel(
        functools.partial(_weight_gradient, padded=padded),
        out_type=jax.ShapeDtypeStruct((n_groups, x.shape[1], dy.shape[1]), w_EKN.dtype),
        scratch_types={
            "x_smem": pinned.smem(2, padded, ROWS),
            "dy_smem": pinned.smem(2, padded, COLUMNS),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        },
        grid=(dy.shape[1] // COLUMNS, x.shape[1] // ROWS, n_groups),
        grid_names=("columns", "rows", "group"),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="grouped_matmul_dw",
    )
    part = kernel(first_E, tiles_E, x, dy)[:, : w_EKN.shape[1], : w_EKN.shape[2]]
    if part.shape == w_EKN.shape:
        return part
    # The groups are some of more matrices; the others had no row.
    return lax.dynamic_update_slice(jnp.zeros_like(w_EKN), part, (plan.first, 0, 0))


def _weight_gradient(
    first_ref, tiles_ref, x_ref, dy_ref, out_ref, *, padded: int, x_smem, dy_smem, full
):
    group, i, j = (lax.axis_index(name) for name in ("group", "rows", "columns"))
    first, n_tiles = first_ref[group], tiles_ref[group]

    def fetch(t):
        slot, rows = lax.rem(t, jnp.int32(2)), pl.ds((first + t) * padded, padded)
        x = x_ref.at[rows, pl.ds(i * ROWS, ROWS)]
        dy = dy_ref.at[rows, pl.ds(j * COLUMNS, COLUMNS)]
        plgpu.copy_gmem_to_smem(x, x_smem.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(dy, dy_smem.at[slot], full.at[slot])

    pl.when(n_tiles > 0)(lambda: fetch(jnp.int32(0)))

    def add(t, total):
        slot = lax.rem(t, jnp.int32(2))
        # The slot is free: its product was waited for in the round before.
        pl.when(t + 1 < n_tiles)(lambda: fetch(t + 1))
        plgpu.barrier_wait(full.at[slot])

        def leaf(accumulator):
            plgpu.wgmma(accumulator, x_smem.at[slot].transpose((1, 0)), dy_smem.at[slot])
            return accumulator[...]

        return total + pl.run_scoped(leaf, plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32))

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
    total = lax.fori_loop(0, n_tiles, add, zeros)
    place = out_ref.at[group, pl.ds(i * ROWS, ROWS), pl.ds(j * COLUMNS, COLUMNS)]
    plgpu.store(place, total.astype(out_ref.dtype), optimized=False)


def _config() -> pinned.Config:
    return tuned.load("grouped_matmul", "gpu", pinned.Config)


def _tiles(counts_E: jax.Array, n_rows: int, tile: int) -> tuple[jax.Array, ...]:
    """First row of each tile, the row after its group's last, its group; how many are used."""
    plan = plan_groups(counts_E, n_rows, tile)
    return plan.start_of_tile, plan.end_of_tile, plan.group_of_tile, plan.n_tiles


def _rows(start_n: jax.Array, end_n: jax.Array, tile: int, n_rows: int):
    """Row at each place of each tile, and whether it is one of the tile's group."""
    row_nt = start_n[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
    return jnp.minimum(row_nt, n_rows - 1), row_nt < end_n[:, None]
