"""Operations that are one function of a tile of rows: the twin calls it once, the kernel per tile.

Sharing the function is what makes interpret mode equal the twin: both compile the same operations
on the same widths, so that a multiplication and an addition are contracted in both or in neither.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuned
from pallas_kernels.backend import Backend
from pallas_kernels.errors import KernelError
from pallas_kernels.pinned_matmul.order import Order
from pallas_kernels.pinned_matmul.xla import contract

FEWEST_ROWS = 8
"""XLA's CPU backend has another path for a single row, so the twin never sees fewer."""

SUBLANES = 16
"""Rows of a packed bf16 tile, the stricter of the two dtypes."""

RowFunction = Callable[..., tuple[jax.Array, ...]]
"""`(*rows, *constants)` -> results; every array is two-dimensional, a constant has one row."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of a row-wise kernel; bits do not depend on them."""

    row_tile: int
    vmem_mib: int
    """What blocks and temporaries may take."""

    def __post_init__(self):
        tuned.multiple("row_tile", self.row_tile, SUBLANES)
        tuned.multiple("vmem_mib", self.vmem_mib, 1)


def apply(
    op: str,
    function: RowFunction,
    rows: Sequence[jax.Array],
    constants: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    backend: Backend,
    config: Config | None = None,
) -> tuple[jax.Array, ...]:
    """Applies the function to all rows.

    Args:
        op: name, for the tiles and errors.
        function: see `RowFunction`.
        rows: arrays `[M, *]`.
        constants: arrays `[1, *]`, the same for all rows.
        out: shape `[M, *]` and dtype of each result.
        backend: the twin or the TPU kernel.
        config: default: that of `tuned.json`.

    Raises:
        KernelError: a tile does not fit VMEM.
    """
    n_rows = out[0].shape[0]
    if n_rows == 0:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in out)
    if backend.kind == "xla":
        pad = max(0, FEWEST_ROWS - n_rows)
        padded = [jnp.pad(x, ((0, pad), (0, 0))) for x in rows] if pad else rows
        return tuple(y[:n_rows] if pad else y for y in function(*padded, *constants))
    config = config or tuned.load(op, "tpu", Config)
    need = vmem_bytes(rows, out, config.row_tile)
    if need > config.vmem_mib * 2**20:
        fits = config.vmem_mib * 2**20 * config.row_tile // need // SUBLANES * SUBLANES
        raise KernelError(
            f"{op}: row_tile {config.row_tile} needs {need / 2**20:.1f} MiB of VMEM, over vmem_mib "
            f"{config.vmem_mib}; nearest is row_tile {fits}"
        )

    def kernel(*refs):
        given, results = refs[: len(rows) + len(constants)], refs[len(rows) + len(constants) :]
        values = function(*(ref[...] for ref in given))
        for ref, value in zip(results, values, strict=True):
            ref[...] = value

    def by_row(width):
        return pl.BlockSpec((config.row_tile, width), lambda i: (i, 0))

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n_rows, config.row_tile),),
        in_specs=[by_row(x.shape[1]) for x in rows]
        + [pl.BlockSpec(x.shape, lambda i: (0, 0)) for x in constants],
        out_specs=[by_row(s.shape[1]) for s in out],
        out_shape=list(out),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_mib * 2**20
        ),
        interpret=backend.interpret,
        name=op,
    )(*rows, *constants)


def vmem_bytes(
    rows: Sequence[jax.Array], out: Sequence[jax.ShapeDtypeStruct], row_tile: int
) -> int:
    """Double-buffered blocks, and three f32 values of the widest one."""
    widths = [x.shape[1] for x in (*rows, *out)]
    blocks = sum(x.shape[1] * x.dtype.itemsize for x in (*rows, *out))
    return row_tile * (2 * blocks + 3 * 4 * max(widths))


def row_sum(x_RD: jax.Array, sum_width: int = 8, sum_pad: int = 64) -> jax.Array:
    """Sum of each row in f32, over `sum_width` equal columns: a product with ones.

    A reduction's order is the compiler's choice; a product's is not (docs/numerics.md).
    """
    # Ones as wide as the product is: what runs in a kernel pads nothing.
    order = Order()
    ones = jnp.ones((x_RD.shape[1], max(sum_width, order.column_pad)), jnp.float32)
    return weighted_sums(x_RD, ones, order, sum_pad)[:, :sum_width]


def weighted_sums(
    x_RK: jax.Array, weights_KW: jax.Array, order: Order, sum_pad: int = 64
) -> jax.Array:
    """`x @ weights` in f32, `[R, W]`, in the leaves and padded columns of the pinned product.

    A product of 8 columns is not enough: an AMD CPU was seen to compute it in another order below
    256 rows. K is padded with zeros to a multiple of `sum_pad`.
    """
    if pad := -x_RK.shape[1] % sum_pad:
        x_RK = jnp.pad(x_RK, ((0, 0), (0, pad)))
        weights_KW = jnp.pad(weights_KW, ((0, pad), (0, 0)))
    return contract(x_RK, weights_KW, order)
