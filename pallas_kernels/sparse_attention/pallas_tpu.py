"""Mosaic TPU kernel: one token a step, its whole list of keys in VMEM at once.

GLM-5.2 lists 2,048 keys of 576 numbers, 2.3 MiB in bf16, so that a softmax needs no second pass and
no running maximum: the arithmetic is the twin's. XLA gathers the list out of the pages before the
kernel; a TPU copies whole tiles of rows, so single rows of a page cannot be fetched by it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuned
from pallas_kernels.errors import KernelError
from pallas_kernels.sparse_attention import xla


@dataclasses.dataclass(frozen=True)
class Config:
    """What blocks and temporaries may take; a step is always one token."""

    vmem_mib: int
    gradient_vmem_mib: int
    """The same for the gradient, which holds the keys' too."""

    def __post_init__(self):
        tuned.multiple("vmem_mib", self.vmem_mib, 1)
        tuned.multiple("gradient_vmem_mib", self.gradient_vmem_mib, 1)


def attend(
    query_RNC: jax.Array,
    keys_RkC: jax.Array,
    listed_Rk: jax.Array,
    scale: float,
    rank: int,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """See `xla.attend`. Raises KernelError where a list does not fit VMEM."""
    config = config or tuned.load("sparse_attention", "tpu", Config)
    (n_rows, n_heads, width), n_keys = query_RNC.shape, keys_RkC.shape[1]
    _fit(vmem_bytes(n_heads, n_keys, width, rank, keys_RkC.dtype.itemsize), n_keys, config.vmem_mib)
    precision = lax.Precision.HIGHEST if keys_RkC.dtype == jnp.float32 else None

    def kernel(query_ref, keys_ref, listed_ref, out_ref):
        out_ref[...] = xla.attend(
            query_ref[...],
            keys_ref[...],
            listed_ref[:, 0, :] != 0,
            scale=scale,
            rank=rank,
            precision=precision,
        )

    return pl.pallas_call(
        kernel,
        grid=(n_rows,),
        in_specs=[_token(n_heads, width), _token(n_keys, width), _token(1, n_keys)],
        out_specs=_token(n_heads, rank),
        out_shape=jax.ShapeDtypeStruct((n_rows, n_heads, rank), keys_RkC.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_mib * 2**20
        ),
        interpret=interpret,
        name="sparse_attention",
    )(query_RNC, keys_RkC, listed_Rk[:, None, :].astype(jnp.int32))


def gradient(
    query_RNC: jax.Array,
    keys_RkC: jax.Array,
    listed_Rk: jax.Array,
    d_RNK: jax.Array,
    scale: float,
    rank: int,
    interpret: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `xla.gradient`. Raises KernelError where a list does not fit VMEM."""
    config = config or tuned.load("sparse_attention", "tpu", Config)
    (n_rows, n_heads, width), n_keys = query_RNC.shape, keys_RkC.shape[1]
    need = gradient_vmem_bytes(n_heads, n_keys, width, rank, keys_RkC.dtype.itemsize)
    _fit(need, n_keys, config.gradient_vmem_mib)
    precision = lax.Precision.HIGHEST if keys_RkC.dtype == jnp.float32 else None

    def kernel(query_ref, keys_ref, listed_ref, d_ref, dq_ref, dk_ref):
        dq_ref[...], dk_ref[...] = xla.gradient(
            query_ref[...],
            keys_ref[...],
            listed_ref[:, 0, :] != 0,
            d_ref[...],
            scale=scale,
            rank=rank,
            precision=precision,
        )

    blocks = [_token(n_heads, width), _token(n_keys, width)]
    return pl.pallas_call(
        kernel,
        grid=(n_rows,),
        in_specs=[*blocks, _token(1, n_keys), _token(n_heads, rank)],
        out_specs=blocks,
        out_shape=[
            jax.ShapeDtypeStruct(query_RNC.shape, keys_RkC.dtype),
            jax.ShapeDtypeStruct(keys_RkC.shape, keys_RkC.dtype),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=config.gradient_vmem_mib * 2**20,
        ),
        interpret=interpret,
        name="sparse_attention_gradient",
    )(query_RNC, keys_RkC, listed_Rk[:, None, :].astype(jnp.int32), d_RNK)


def _token(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *shape), lambda i: (i, 0, 0))


def _fit(need: int, n_keys: int, vmem_mib: int) -> None:
    if need > vmem_mib * 2**20:
        raise KernelError(
            f"sparse_attention: a list of {n_keys} keys needs {need / 2**20:.1f} MiB of VMEM, over "
            f"vmem_mib {vmem_mib}; nearest is {vmem_mib * 2**20 * n_keys // need // 128 * 128} keys"
        )


def vmem_bytes(n_heads: int, n_keys: int, width: int, rank: int, item: int) -> int:
    """Double-buffered blocks, and the scores and weights of one token in f32."""
    blocks = (n_heads * (width + rank) + n_keys * width) * item + n_keys * 4
    return 2 * blocks + (3 * n_heads * n_keys + n_heads * width) * 4


def gradient_vmem_bytes(n_heads: int, n_keys: int, width: int, rank: int, item: int) -> int:
    """Double-buffered blocks, the weights and their gradients, and the keys' gradient in f32."""
    blocks = (n_heads * (2 * width + rank) + 2 * n_keys * width) * item + n_keys * 4
    return 2 * blocks + (5 * n_heads * n_keys + 2 * n_keys * width) * 4
