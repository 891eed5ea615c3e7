"""Exclusive or of the bits of two arrays, with the number of changed elements by block.

Numerics contract: integers only, so exact everywhere. +0 and -0 differ, a NaN equals itself exactly
if its bits are the same: this compares storage, not values. `xor_apply` is the inverse.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped, UInt

from pallas_kernels import rowwise
from pallas_kernels.backend import Backend, Implementation, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.xor_delta import xla

KINDS = ("xla", "tpu")
BLOCK = 1024
"""Elements of a block, in the order of the flattened array; the last one may be short."""

UNSIGNED = {"float32": "uint32", "bfloat16": "uint16", "float16": "uint16"}


def xor_delta(
    old: Shaped[Array, "..."],
    new: Shaped[Array, "..."],
    *,
    implementation: Implementation | Backend = "auto",
) -> tuple[UInt[Array, "n"], Int[Array, "blocks"]]:
    """What changed from `old` to `new`.

    Returns:
        The exclusive or of the flattened bits, uint32 or uint16; and the number of elements of each
        block of 1,024 that changed, int32.

    Raises:
        KernelError: shapes or dtypes differ, a dtype is not supported, or no such implementation.
    """
    _check(old, new)
    backend = resolve("xor_delta", implementation, KINDS)
    n, unsigned = old.size, UNSIGNED[old.dtype.name]

    def blocks(x):
        flat = lax.bitcast_convert_type(x, unsigned).reshape(-1)
        return jnp.pad(flat, (0, -n % BLOCK)).reshape(-1, BLOCK)

    n_blocks = -(-n // BLOCK)
    out = [
        jax.ShapeDtypeStruct((n_blocks, BLOCK), unsigned),
        jax.ShapeDtypeStruct((n_blocks, 1), jnp.int32),
    ]
    rows = [blocks(old), blocks(new)]
    delta_RB, changed_R1 = rowwise.apply("xor_delta", xla.delta, rows, [], out, backend)
    return delta_RB.reshape(-1)[:n], changed_R1[:, 0]


def xor_apply(old: Shaped[Array, "..."], delta_n: UInt[Array, "n"]) -> Shaped[Array, "..."]:
    """The array that `delta_n` was made for: `xor_apply(old, xor_delta(old, new)[0])` is `new`.

    Raises:
        KernelError: the delta is of another size or dtype.
    """
    unsigned = UNSIGNED.get(old.dtype.name)
    if unsigned is None or delta_n.dtype.name != unsigned or delta_n.shape != (old.size,):
        raise KernelError(
            f"xor_delta: delta {delta_n.dtype}{delta_n.shape} does not fit {old.dtype}{old.shape}"
        )
    bits = lax.bitcast_convert_type(old, delta_n.dtype) ^ delta_n.reshape(old.shape)
    return lax.bitcast_convert_type(bits, old.dtype)


def _check(old: Array, new: Array) -> None:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise KernelError(
            f"xor_delta: old {old.dtype}{old.shape} and new {new.dtype}{new.shape} must agree"
        )
    if old.dtype.name not in UNSIGNED:
        raise KernelError(f"xor_delta: dtype {old.dtype}; supported are {', '.join(UNSIGNED)}")
