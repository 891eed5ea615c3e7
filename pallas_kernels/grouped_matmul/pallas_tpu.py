"""Mosaic TPU kernels of the grouped product.

Forward: rows lie in tiles that are aligned to the array, not to groups, since a TPU reads whole
sublanes. A *visit* multiplies one tile with one group's matrix and keeps the rows of that group; a
tile that several groups share is visited once for each, one after another, so that it stays in
VMEM. A row's sum does not see the other rows of its tile, so its bits are those of any other tile.

Weight gradient: its leaves are tiles counted from the group's first row, as in the twin; rows are
first copied to where these tiles are aligned (a move, which rounds nothing).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuned
from pallas_kernels.errors import KernelError
from pallas_kernels.pinned_matmul.order import Order
from pallas_kernels.pinned_matmul.pallas_tpu import (
    LANES,
    SUBLANES,
    Config,
    dot,
    leaves_product,
    plan_tiles,
    step,
)


@dataclasses.dataclass(frozen=True)
class Tiles(Config):
    """Tiles of the forward (see `Config`), and of the weight gradient's result."""

    gradient_tile: int
    """Rows and columns of a tile of the weight gradient."""

    def __post_init__(self):
        super().__post_init__()
        tuned.multiple("gradient_tile", self.gradient_tile, LANES)


def plan_visits(counts_E: jax.Array, n_rows: int, row_tile: int) -> tuple[jax.Array, ...]:
    """Which tile is multiplied with which group's matrix.

    Returns:
        Group and tile of each visit, tiles ascending, the last visit repeated to the end; how many
        visits there are `[1]`; first row of each group and the row after its last.
    """
    end_E = jnp.cumsum(counts_E).astype(jnp.int32)
    start_E = end_E - counts_E
    first_E = start_E // row_tile
    visits_E = jnp.where(counts_E > 0, (end_E - 1) // row_tile - first_E + 1, 0)
    visit_end_E = jnp.cumsum(visits_E).astype(jnp.int32)
    n_visits = visit_end_E[-1]
    most = -(-n_rows // row_tile) + counts_E.shape[0] - 1
    visit_v = jnp.minimum(jnp.arange(most, dtype=jnp.int32), jnp.maximum(n_visits - 1, 0))
    group_v = jnp.sum(visit_end_E[None, :] <= visit_v[:, None], axis=1, dtype=jnp.int32)
    group_v = jnp.minimum(group_v, counts_E.shape[0] - 1)
    tile_v = first_E[group_v] + visit_v - (visit_end_E - visits_E)[group_v]
    tile_v = jnp.where(n_visits > 0, tile_v, 0).astype(jnp.int32)
    return group_v, tile_v, n_visits[None], start_E.astype(jnp.int32), end_E


def forward(
    x_MK: jax.Array,
    w_EKN: jax.Array,
    group_plan,
    layout: str,
    order: Order,
    interpret: bool,
    tiles: Tiles | None = None,
) -> jax.Array:
    """`x @ w[group]` for layout `nn`, `x @ w[group]^T` for `nt`; rows of no group are undefined.

    Raises:
        KernelError: the tiles do not fit VMEM.
    """
    tiles = tiles or tuned.load("grouped_matmul", "tpu", Tiles)
    (n_rows, n_inner), width = x_MK.shape, w_EKN.shape[2 if layout == "nn" else 1]
    plan = plan_tiles(n_rows, width, n_inner, order.k_leaf, "nn", tiles)
    need = plan.vmem_bytes(x_MK.dtype.itemsize, x_MK.dtype.itemsize)
    _fit(need, tiles, f"leaves_a_step {max(1, plan.leaves_a_step // 2)}")
    visits = plan_visits(group_plan.counts_E, n_rows, plan.row_tile)
    matrix_v = visits[0] + group_plan.first

    def matrix(j, v, k, matrix_v, *_):
        return (matrix_v[v], k, j) if layout == "nn" else (matrix_v[v], j, k)

    def x_block(j, v, k, matrix_v, group_v, tile_v, *_):
        return tile_v[v], k

    def out_block(j, v, k, matrix_v, group_v, tile_v, *_):
        return tile_v[v], j

    inner, columns = plan.step, plan.column_tile
    shape = (None, inner, columns) if layout == "nn" else (None, columns, inner)
    scratch = (plan.n_levels, plan.row_tile, plan.column_tile)
    return pl.pallas_call(
        functools.partial(_forward, plan=plan, layout=layout, order=order),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(visits),
            grid=(pl.cdiv(width, columns), visits[0].shape[0], plan.n_steps),
            in_specs=[
                pl.BlockSpec((plan.row_tile, inner), x_block),
                pl.BlockSpec(shape, matrix),
            ],
            out_specs=pl.BlockSpec((plan.row_tile, columns), out_block),
            scratch_shapes=[pltpu.VMEM(scratch, jnp.float32)] if plan.n_levels else [],
        ),
        out_shape=jax.ShapeDtypeStruct((n_rows, width), x_MK.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=tiles.vmem_mib * 2**20,
        ),
        interpret=interpret,
        name=f"grouped_matmul_{layout}",
    )(matrix_v, *visits, x_MK, w_EKN)


def _forward(
    _,
    group_v,
    tile_v,
    n_visits,
    start_E,
    end_E,
    x_ref,
    w_ref,
    out_ref,
    *scratch,
    plan,
    layout,
    order,
):
    visit = pl.program_id(1)
    group = group_v[visit]

    def product(n_leaves, last_width):
        return leaves_product(x_ref, w_ref, n_leaves, last_width, plan.leaf, layout, order)

    def write(value):
        shape = (plan.row_tile, plan.column_tile)
        row = tile_v[visit] * plan.row_tile + lax.broadcasted_iota(jnp.int32, shape, 0)
        mine = (row >= start_E[group]) & (row < end_E[group])
        kept = jnp.where(mine, value, out_ref[...].astype(jnp.float32))
        out_ref[...] = kept.astype(out_ref.dtype)

    @pl.when(visit < n_visits[0])
    def _():
        step(pl.program_id(2), plan, product, scratch, write)


def weight_gradient(
    x_MK: jax.Array,
    dy_MN: jax.Array,
    w_EKN: jax.Array,
    group_plan,
    tile: int,
    interpret: bool,
    tiles: Tiles | None = None,
) -> jax.Array:
    """See `xla.weight_gradient`; `group_plan` is the twin's, `tile` its rows a tile.

    Raises:
        KernelError: the tile is no multiple of a TPU's sublanes, or the tiles do not fit VMEM.
    """
    tiles = tiles or tuned.load("grouped_matmul", "tpu", Tiles)
    if tile % SUBLANES:
        # Rows of zeros add nothing: the twin's short tile is a whole one that ends in them.
        padded = -(-tile // SUBLANES) * SUBLANES
    else:
        padded = tile
    n_inner, width = w_EKN.shape[1:]
    offset_t = jnp.arange(padded, dtype=jnp.int32)
    row_nt = group_plan.start_of_tile[:, None] + offset_t[None, :]
    mine_nt = (row_nt < group_plan.end_of_tile[:, None]) & (offset_t < tile)[None, :]
    row_nt = jnp.minimum(row_nt, x_MK.shape[0] - 1)

    def aligned(a):
        # Rows of the next group (or spare rows) may hold anything: select, never multiply.
        rows = jnp.where(mine_nt[:, :, None], a[row_nt], jnp.zeros((), a.dtype))
        return rows.reshape(-1, a.shape[1])

    rows_a, rows_b = (min(tiles.gradient_tile, -(-n // LANES) * LANES) for n in (n_inner, width))
    need = 2 * padded * (rows_a + rows_b) * x_MK.dtype.itemsize + 4 * rows_a * rows_b * 4
    _fit(need, tiles, f"gradient_tile {max(LANES, tiles.gradient_tile // 2)}")
    n_tiles = row_nt.shape[0]
    # Past the last tile the last group is named again, so that no block is fetched.
    last = jnp.maximum(group_plan.n_tiles - 1, 0)
    group_n = group_plan.group_of_tile[jnp.minimum(jnp.arange(n_tiles), last)]
    dw_EKN = pl.pallas_call(
        _weight_gradient,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(n_inner, rows_a), pl.cdiv(width, rows_b), n_tiles),
            in_specs=[
                pl.BlockSpec((padded, rows_a), lambda i, j, t, *_: (t, i)),
                pl.BlockSpec((padded, rows_b), lambda i, j, t, *_: (t, j)),
            ],
            out_specs=pl.BlockSpec((None, rows_a, rows_b), lambda i, j, t, g, n: (g[t], i, j)),
            scratch_shapes=[pltpu.VMEM((rows_a, rows_b), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(w_EKN.shape, w_EKN.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tiles.vmem_mib * 2**20,
        ),
        interpret=interpret,
        name="grouped_matmul_dw",
    )(group_n, group_plan.n_tiles[None].astype(jnp.int32), aligned(x_MK), aligned(dy_MN))
    # A group without rows is never visited: its block holds anything.
    counts = jnp.zeros(w_EKN.shape[0], group_plan.counts_E.dtype)
    counts = lax.dynamic_update_slice(counts, group_plan.counts_E, (group_plan.first,))
    return jnp.where((counts > 0)[:, None, None], dw_EKN, jnp.zeros((), dw_EKN.dtype))


def _weight_gradient(group_n, n_tiles, x_ref, dy_ref, out_ref, total_ref):
    t = pl.program_id(2)
    before = group_n[jnp.maximum(t - 1, 0)]

    @pl.when(t < n_tiles[0])
    def _():
        @pl.when((t == 0) | (before != group_n[t]))
        def _():
            total_ref[...] = jnp.zeros_like(total_ref)

        total_ref[...] = total_ref[...] + dot(x_ref[...], dy_ref[...], "tn")
        out_ref[...] = total_ref[...].astype(out_ref.dtype)


def _fit(need: int, tiles: Tiles, nearest: str) -> None:
    if need > tiles.vmem_mib * 2**20:
        raise KernelError(
            f"grouped_matmul: tiles need {need / 2**20:.1f} MiB of VMEM, over vmem_mib "
            f"{tiles.vmem_mib}; nearest is {nearest}"
        )
