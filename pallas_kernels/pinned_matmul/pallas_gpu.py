"""Mosaic GPU kernel (Hopper): tensor-core products of leaves, fed by a ring of TMA copies.

A block of threads holds one tile of the result. One warpgroup copies blocks of the contraction into
a ring in SMEM; the others multiply 64 rows each. A leaf starts from a fresh accumulator, so that it
is one chain of `wgmma` whatever the tile; the leaves of a step are added in their tree in
registers, and the sums of steps like bits of a binary counter in SMEM, as in the TPU kernel.

`wgmma` rounds f32 operands to TF32, so f32 has no kernel here. Interpreted, a block is as wide as a
leaf: the interpreter computes a block by one product, as the twin computes a leaf.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.errors import KernelError
from pallas_kernels.pinned_matmul.order import AXES, Layout
from pallas_kernels.tree import tree_sum

ROWS = 64
"""Rows that a warpgroup multiplies at once."""
SWIZZLE = 128
"""Bytes of a row of a tile in SMEM."""

NO_LIMIT_KIB = 2**20
"""Of SMEM when interpreted."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles; bits depend on none of them."""

    warpgroups: int
    """That multiply, 64 rows each; one where there are no more rows, or where two do not fit."""
    column_tiles: tuple[int, ...]
    """Widest first; the first that fits SMEM is taken."""
    block: int
    """Width of the contraction that one copy brings."""
    slots: int
    """Of the ring."""
    leaves_a_step: int
    """A power of two; their tree is held in registers."""
    smem_kib: int
    """What a block of threads may hold; Hopper has 227."""

    def __post_init__(self):
        tuned.multiple("block", self.block, SWIZZLE // 2)
        for tile in self.column_tiles:
            tuned.multiple("column_tiles", tile, 64)
        for name in ("warpgroups", "slots", "leaves_a_step"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise KernelError(f"{name} {value}: must be a power of two")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call."""

    warpgroups: int
    column_tile: int
    block: int
    leaf: int
    leaves_a_step: int
    slots: int
    n_inner: int
    layout: Layout

    @property
    def row_tile(self) -> int:
        """Rows of a block of threads."""
        return self.warpgroups * ROWS

    @property
    def n_blocks(self) -> int:
        """Blocks of the contraction; the last may end in zeros."""
        return -(-self.n_inner // self.block)

    @property
    def step(self) -> int:
        """Blocks of a step."""
        return self.leaves_a_step * self.leaf // self.block

    @property
    def n_steps(self) -> int:
        """Steps of the contraction."""
        return -(-self.n_blocks // self.step)

    @property
    def n_levels(self) -> int:
        """Partial sums that wait in SMEM."""
        return (self.n_steps - 1).bit_length()

    @property
    def smem_bytes(self) -> int:
        """The ring (bf16) and the waiting sums (f32)."""
        ring = self.slots * (self.row_tile + self.column_tile) * self.block * 2
        return ring + self.n_levels * self.row_tile * self.column_tile * 4


def plan_tiles(
    n_rows: int, width: int, n_inner: int, leaf: int, layout: Layout, config: Config, op: str
) -> Plan:
    """The largest tile that fits SMEM, no wider than there are columns.

    Fewer rows are the last resort: a longer contraction has more sums that wait in SMEM.

    Raises:
        KernelError: the leaf is no multiple of the block, or no tile fits.
    """
    if leaf % config.block:
        nearest = max(config.block, leaf // config.block * config.block)
        raise KernelError(
            f"{op}: gpu kernel: leaf {leaf}: must be a multiple of block {config.block}; "
            f"nearest is {nearest}"
        )
    warpgroups = (1,) if n_rows <= ROWS else (config.warpgroups, 1)
    n_leaves = -(-n_inner // leaf)
    leaves_a_step = min(config.leaves_a_step, 1 << (n_leaves - 1).bit_length())
    narrowest = min(config.column_tiles)
    plans = [
        Plan(count, tile, config.block, leaf, leaves_a_step, config.slots, n_inner, layout)
        for count in warpgroups
        for tile in config.column_tiles
        if tile == narrowest or tile < width + narrowest
    ]
    fits = [plan for plan in plans if plan.smem_bytes <= config.smem_kib * 1024]
    if not fits:
        raise KernelError(
            f"{op}: gpu kernel: column_tiles {config.column_tiles} need at least "
            f"{plans[-1].smem_bytes / 1024:.0f} KiB of SMEM, over {config.smem_kib}; nearest is "
            f"slots {max(1, config.slots // 2)}"
        )
    return fits[0]


def contract(
    a: jax.Array,
    b: jax.Array,
    layout: Layout,
    leaf: int,
    dtype: str,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """See `op.contract`. Raises KernelError for f32, a leaf off the block, or too much SMEM."""
    check_dtype("pinned_matmul", a.dtype)
    config = config or tuned.load("pinned_matmul", "gpu", Config)
    config = interpreted(config, leaf, interpret)
    return multiply("pinned_matmul", a, b, layout, leaf, dtype, interpret, config)


def interpreted(config: Config, leaf: int, interpret: bool) -> Config:
    """The tiles, or those of the interpreter: a block is a leaf, and SMEM has no end."""
    if not interpret:
        return config
    return dataclasses.replace(config, block=leaf, smem_kib=NO_LIMIT_KIB)


def check_dtype(op: str, dtype) -> None:
    """Refuses what a tensor core would round."""
    if dtype != jnp.bfloat16:
        raise KernelError(
            f"{op}: gpu kernel: dtype {dtype}; supported is bfloat16: a tensor core rounds "
            "float32 to TF32. Ask for 'xla'"
        )


def multiply(
    op: str,
    a: jax.Array,
    b: jax.Array,
    layout: Layout,
    leaf: int,
    dtype: str,
    interpret: bool,
    config: Config,
    groups: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The product of every row tile; with `groups`, of its own matrix of the stack `b`.

    Args:
        op: name, for errors and the kernel.
        a: operand of the rows, see `Layout`.
        b: operand of the columns; with `groups` it has a first axis of matrices.
        layout: which axes are contracted.
        leaf: width of a leaf.
        dtype: of the result.
        interpret: run by the interpreter of Mosaic GPU, on a CPU.
        config: tiles.
        groups: matrix of each row tile, and how many tiles are used `[1]`; other tiles of the
            result hold anything. Row tiles are then of `ROWS` rows.
    """
    axis_a, axis_b = AXES[layout]
    n_rows, n_inner = a.shape[1 - axis_a], a.shape[axis_a]
    width = b.shape[-1 if axis_b == 0 else -2]
    rows = ROWS if groups is not None else n_rows
    plan = plan_tiles(rows, width, n_inner, leaf, layout, config, op)
    a = _padded(a, axis_a, plan.row_tile, plan.block)
    b = _padded(b, b.ndim - 2 + axis_b, plan.column_tile, plan.block)
    n_row_tiles = a.shape[1 - axis_a] // plan.row_tile
    n_column_tiles = b.shape[-1 if axis_b == 0 else -2] // plan.column_tile
    scalars = groups or ()
    out = jax.ShapeDtypeStruct(
        (n_row_tiles * plan.row_tile, n_column_tiles * plan.column_tile), dtype
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan, grouped=groups is not None),
        out_type=out,
        scratch_types=_scratch(plan, a.dtype),
        grid=(n_column_tiles, n_row_tiles),
        grid_names=("columns", "rows"),
        num_threads=plan.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=f"{op}_{layout}",
    )
    return kernel(*scalars, a, b)[:n_rows, :width]


def _padded(x: jax.Array, inner: int, tile: int, block: int) -> jax.Array:
    """Zeros after the last two axes, to whole tiles and blocks; they add nothing."""
    pads = [(0, 0)] * x.ndim
    for axis in (x.ndim - 2, x.ndim - 1):
        pads[axis] = (0, -x.shape[axis] % (block if axis == inner else tile))
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


def smem(*shape: int, dtype=jnp.bfloat16):
    """A buffer in SMEM laid out as `wgmma` reads it."""
    item = jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, SWIZZLE // item))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(SWIZZLE)  # pyright: ignore[reportAbstractUsage]
    transforms = (tiling, swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scratch(plan: Plan, dtype) -> dict:
    a = (plan.row_tile, plan.block) if plan.layout != "tn" else (plan.block, plan.row_tile)
    b = (plan.block, plan.column_tile) if plan.layout != "nt" else (plan.column_tile, plan.block)
    sums = (max(1, plan.n_levels), plan.row_tile, plan.column_tile)
    return {
        "a_smem": smem(plan.slots, *a, dtype=dtype),
        "b_smem": smem(plan.slots, *b, dtype=dtype),
        "sums": smem(*sums, dtype=jnp.float32) if plan.n_levels else None,
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots),
        "free": plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.slots),
    }


def _kernel(*refs, plan: Plan, grouped: bool, a_smem, b_smem, sums, full, free):
    *groups, a_ref, b_ref, out_ref = refs
    i, j, wg = (lax.axis_index(name) for name in ("rows", "columns", "wg"))

    def tile():
        b = b_ref.at[groups[0][i]] if grouped else b_ref

        @pl.when(wg == plan.warpgroups)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            _copy(plan, a_ref, b, i, j, a_smem, b_smem, full, free)

        @pl.when(wg < plan.warpgroups)
        def _():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg * ROWS, ROWS)
            product = functools.partial(_leaf, plan, mine, a_smem, b_smem, full, free)
            waiting = sums.at[:, mine, :] if plan.n_levels else None
            total = _total(plan, product, waiting)
            rows = pl.ds(i * plan.row_tile + wg * ROWS, ROWS)
            columns = pl.ds(j * plan.column_tile, plan.column_tile)
            plgpu.store(out_ref.at[rows, columns], total.astype(out_ref.dtype), optimized=False)

    if grouped:
        pl.when(i < groups[1][0])(tile)
    else:
        tile()


def _copy(plan: Plan, a_ref, b_ref, i, j, a_smem, b_smem, full, free) -> None:
    """Brings the blocks of the contraction into the ring, in order."""
    rows = pl.ds(i * plan.row_tile, plan.row_tile)
    columns = pl.ds(j * plan.column_tile, plan.column_tile)

    @pl.loop(0, plan.n_blocks)
    def _(k):
        slot = lax.rem(k, jnp.int32(plan.slots))

        @pl.when(k >= plan.slots)
        def _():
            plgpu.barrier_wait(free.at[slot])

        inner = pl.ds(k * plan.block, plan.block)
        a = (rows, inner) if plan.layout != "tn" else (inner, rows)
        b = (inner, columns) if plan.layout != "nt" else (columns, inner)
        plgpu.copy_gmem_to_smem(a_ref.at[a], a_smem.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(b_ref.at[b], b_smem.at[slot], full.at[slot])


def _leaf(plan: Plan, mine, a_smem, b_smem, full, free, first, n_blocks: int) -> jax.Array:
    """One leaf: `n_blocks` blocks from number `first` on, in a fresh accumulator."""

    def chain(accumulator):
        for n in range(n_blocks):
            slot = lax.rem(first + n, jnp.int32(plan.slots))
            plgpu.barrier_wait(full.at[slot])
            a, b = a_smem.at[slot], b_smem.at[slot]
            a = a.at[:, mine].transpose((1, 0)) if plan.layout == "tn" else a.at[mine]
            b = b.transpose((1, 0)) if plan.layout == "nt" else b
            plgpu.wgmma(accumulator, a, b)
            # The block before is read when only this one is in flight.
            plgpu.wgmma_wait(1)
            if n:
                plgpu.barrier_arrive(free.at[lax.rem(first + n - 1, jnp.int32(plan.slots))])
        value = accumulator[...]
        plgpu.barrier_arrive(free.at[lax.rem(first + n_blocks - 1, jnp.int32(plan.slots))])
        return value

    return pl.run_scoped(chain, plgpu.WGMMAAccumulatorRef((ROWS, plan.column_tile), jnp.float32))


def _total(plan: Plan, product, sums) -> jax.Array:
    """The tree over all leaves: steps of a tree in registers, joined in SMEM."""
    leaf = plan.leaf // plan.block

    def step(first, n_blocks: int) -> jax.Array:
        starts = range(0, n_blocks, leaf)
        return tree_sum([product(first + n, min(leaf, n_blocks - n)) for n in starts])

    last = plan.n_steps - 1

    @pl.loop(0, last)
    def _(k):
        value = step(k * plan.step, plan.step)
        for level in range(plan.n_levels):
            # Step k finds `level` sums below it occupied: it joins them and waits at `level`.
            @pl.when(k & ((2 << level) - 1) == (1 << level) - 1)
            def _(level=level):
                total = value
                for lower in range(level):
                    total = sums[lower] + total
                sums[level] = total

    first = jnp.int32(last * plan.step)
    total = step(first, plan.n_blocks - last * plan.step)
    for level in range(plan.n_levels):
        if last >> level & 1:
            total = sums[level] + total
    return total
