"""Mosaic TPU kernel: every block of rows and columns holds all of its leaves."""

import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuned
from pallas_kernels.errors import KernelError
from pallas_kernels.ordered_sum import xla


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles; no bit depends on them."""

    row_tile: int
    column_tile: int
    vmem_mib: int

    def __post_init__(self):
        tuned.multiple("row_tile", self.row_tile, 16)
        tuned.multiple("column_tile", self.column_tile, 128)
        tuned.multiple("vmem_mib", self.vmem_mib, 1)


def total(leaves_GMD: jax.Array, interpret: bool, config: Config | None = None) -> jax.Array:
    """See `xla.total`. Raises KernelError where the leaves do not fit VMEM."""
    config = config or tuned.load("ordered_sum", "tpu", Config)
    n_leaves, n_rows, width = leaves_GMD.shape
    column_tile = min(config.column_tile, -(-width // 128) * 128)
    tile = config.row_tile * column_tile
    need = 2 * (n_leaves + 1) * tile * leaves_GMD.dtype.itemsize + (n_leaves + 1) * tile * 4
    if need > config.vmem_mib * 2**20:
        most = config.vmem_mib * 2**20 * n_leaves // need
        raise KernelError(
            f"ordered_sum: {n_leaves} leaves need {need / 2**20:.1f} MiB of VMEM, over vmem_mib "
            f"{config.vmem_mib}; nearest is {most} leaves"
        )

    def kernel(leaves_ref, out_ref):
        out_ref[...] = xla.total(leaves_ref[...])

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n_rows, config.row_tile), pl.cdiv(width, column_tile)),
        in_specs=[pl.BlockSpec((n_leaves, config.row_tile, column_tile), lambda i, j: (0, i, j))],
        out_specs=pl.BlockSpec((config.row_tile, column_tile), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((n_rows, width), leaves_GMD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=config.vmem_mib * 2**20,
        ),
        interpret=interpret,
        name="ordered_sum",
    )(leaves_GMD)
