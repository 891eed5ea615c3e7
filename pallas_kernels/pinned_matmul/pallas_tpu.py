"""Mosaic TPU kernel: rows and columns in parallel tiles, the contraction step by step.

A step multiplies `leaves_a_step` leaves and adds them in their tree; the sums of steps are added
like bits of a binary counter in VMEM scratch, which gives the balanced tree over all leaves while
holding log2(steps) partial sums.
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
from pallas_kernels.pinned_matmul import xla
from pallas_kernels.pinned_matmul.order import AXES, Layout, Order
from pallas_kernels.tree import tree_sum

LANES = 128
SUBLANES = 16
"""Rows of a packed bf16 tile, the stricter of the two dtypes."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles; bits depend on none of them (tests compare several)."""

    row_tiles: tuple[int, ...]
    """Rows a tile; the smallest that holds all rows, else the largest."""
    column_tile: int
    leaves_a_step: int
    """A power of two."""
    vmem_mib: int
    """What blocks, scratch and temporaries may take."""

    def __post_init__(self):
        if not self.row_tiles or list(self.row_tiles) != sorted(set(self.row_tiles)):
            raise KernelError(f"row_tiles {self.row_tiles}: must be ascending, different sizes")
        for tile in self.row_tiles:
            tuned.multiple("row_tiles", tile, SUBLANES)
        tuned.multiple("column_tile", self.column_tile, LANES)
        tuned.multiple("vmem_mib", self.vmem_mib, 1)
        if self.leaves_a_step < 1 or self.leaves_a_step & (self.leaves_a_step - 1):
            raise KernelError(f"leaves_a_step {self.leaves_a_step}: must be a power of two")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call."""

    row_tile: int
    column_tile: int
    leaf: int
    leaves_a_step: int
    n_inner: int

    @property
    def step(self) -> int:
        """Width of the contraction in one step."""
        return self.leaf * self.leaves_a_step

    @property
    def n_steps(self) -> int:
        """Steps of the contraction."""
        return -(-self.n_inner // self.step)

    @property
    def n_levels(self) -> int:
        """Partial sums that wait in scratch."""
        return (self.n_steps - 1).bit_length()

    def vmem_bytes(self, item: int, out_item: int) -> int:
        """Double-buffered blocks, scratch, and the f32 values of one step."""
        tile = self.row_tile * self.column_tile
        blocks = (self.row_tile + self.column_tile) * self.step * item + tile * out_item
        return 2 * blocks + (self.n_levels + 2) * tile * 4


def contract(
    a: jax.Array,
    b: jax.Array,
    layout: Layout,
    order: Order,
    leaf: int,
    dtype: str,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """See `op.contract`. Raises KernelError where the tiles do not fit VMEM."""
    config = config or tuned.load("pinned_matmul", "tpu", Config)
    axis_a, axis_b = AXES[layout]
    n_rows, width, n_inner = a.shape[1 - axis_a], b.shape[1 - axis_b], a.shape[axis_a]
    plan = plan_tiles(n_rows, width, n_inner, leaf, layout, config)
    need = plan.vmem_bytes(a.dtype.itemsize, jnp.dtype(dtype).itemsize)
    if need > config.vmem_mib * 2**20:
        raise KernelError(
            f"pinned_matmul: tiles {plan.row_tile} x {plan.column_tile} with steps of {plan.step} "
            f"need {need / 2**20:.1f} MiB of VMEM, over vmem_mib {config.vmem_mib}; nearest is "
            f"leaves_a_step {max(1, plan.leaves_a_step // 2)}"
        )

    def block(axis, tile, tile_index):
        shape, order_of = [plan.step, plan.step], axis
        shape[1 - axis] = tile

        def index(i, j, k):
            place = [k, k]
            place[1 - order_of] = (i, j)[tile_index]
            return tuple(place)

        return pl.BlockSpec(tuple(shape), index)

    scratch = (plan.n_levels, plan.row_tile, plan.column_tile)
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, layout=layout, order=order),
        grid=(pl.cdiv(n_rows, plan.row_tile), pl.cdiv(width, plan.column_tile), plan.n_steps),
        in_specs=[block(axis_a, plan.row_tile, 0), block(axis_b, plan.column_tile, 1)],
        out_specs=pl.BlockSpec((plan.row_tile, plan.column_tile), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((n_rows, width), dtype),
        scratch_shapes=[pltpu.VMEM(scratch, jnp.float32)] if plan.n_levels else [],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=config.vmem_mib * 2**20,
        ),
        interpret=interpret,
        name=f"pinned_matmul_{layout}",
    )(a, b)


def plan_tiles(
    n_rows: int, width: int, n_inner: int, leaf: int, layout: Layout, config: Config
) -> Plan:
    """Tiles for a shape: no wider than the rows, columns and leaves there are."""
    unit = LANES if layout == "tn" else SUBLANES  # of `tn` the rows lie along lanes
    fits = [tile for tile in config.row_tiles if tile % unit == 0 and tile >= n_rows]
    widest = max((tile for tile in config.row_tiles if tile % unit == 0), default=unit)
    n_leaves = -(-n_inner // leaf)
    leaves_a_step = min(config.leaves_a_step, 1 << (n_leaves - 1).bit_length())
    column_tile = min(config.column_tile, -(-width // LANES) * LANES)
    return Plan(fits[0] if fits else widest, column_tile, leaf, leaves_a_step, n_inner)


def _kernel(a_ref, b_ref, out_ref, *scratch, plan: Plan, layout: Layout, order: Order):
    def product(n_leaves, last_width):
        return leaves_product(a_ref, b_ref, n_leaves, last_width, plan.leaf, layout, order)

    def write(value):
        out_ref[...] = value.astype(out_ref.dtype)

    step(pl.program_id(2), plan, product, scratch, write)


def leaves_product(
    a_ref, b_ref, n_leaves: int, last_width: int, leaf: int, layout: Layout, order: Order
) -> jax.Array:
    """The tree over the leaves of one step; the last one may be short."""
    axis_a, axis_b = AXES[layout]
    leaves = []
    for j in range(n_leaves):
        width = last_width if j == n_leaves - 1 else leaf
        a = _leaf(a_ref, axis_a, j * leaf, leaf, width)
        b = _leaf(b_ref, axis_b, j * leaf, leaf, width)
        leaves.append(xla.leaf(a, b, layout, order, dot=dot))
    return tree_sum(leaves)


def step(k, plan: Plan, product, scratch, write) -> None:
    """Step `k` of the contraction: adds its leaves to the sums that wait, or writes the total.

    Args:
        k: number of the step (traced).
        plan: the sizes.
        product: `(n_leaves, width of the last)` -> the tree over the leaves of this step.
        scratch: a reference to `[n_levels, row_tile, column_tile]` f32, or none for one step.
        write: takes the total, in the last step.
    """
    last = plan.n_steps - 1

    def finish():
        n_leaves = -(-(plan.n_inner - last * plan.step) // plan.leaf)
        value = product(n_leaves, plan.n_inner - last * plan.step - (n_leaves - 1) * plan.leaf)
        for level in range(plan.n_levels):
            if last >> level & 1:
                value = scratch[0][level] + value
        write(value)

    def push():
        value = product(plan.leaves_a_step, plan.leaf)
        for level in range(plan.n_levels):
            # Step k finds `level` sums below it occupied: it joins them and waits at `level`.
            @pl.when(k & ((2 << level) - 1) == (1 << level) - 1)
            def _(level=level):
                total = value
                for lower in range(level):
                    total = scratch[0][lower] + total
                scratch[0][level] = total

    if last:
        pl.when(k < last)(push)
        pl.when(k == last)(finish)
    else:
        finish()


def _leaf(ref, axis: int, start: int, size: int, width: int) -> jax.Array:
    """A leaf's part of a block; what lies past `width` is outside of the array and made zero."""
    value = ref[:, start : start + size] if axis else ref[start : start + size, :]
    if width == size:
        return value
    inside = lax.broadcasted_iota(jnp.int32, value.shape, axis) < width
    return jnp.where(inside, value, jnp.zeros_like(value))


def dot(a: jax.Array, b: jax.Array, layout: Layout) -> jax.Array:
    """As `xla.dot`; Mosaic knows a contract precision for f32 operands only."""
    axis_a, axis_b = AXES[layout]
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
