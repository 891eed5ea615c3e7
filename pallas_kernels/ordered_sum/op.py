"""Sum of stacked leaves, as it is taken of what a collective has gathered.

Numerics contract. Leaves are added in f32 in the balanced binary tree of `pallas_kernels.tree`
(neighbours first, an odd one passes up), and the sum is rounded once to the leaves' dtype. A result
depends on the leaves at its place and on their order only, never on shape or tile. The gradient of
every leaf is that of the sum: a copy, which rounds nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.backend import Backend, Implementation, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.ordered_sum import pallas_tpu, xla

KINDS = ("xla", "tpu")
DTYPES = ("float32", "bfloat16")


def ordered_sum(
    leaves_GMD: Float[Array, "G M D"], *, implementation: Implementation | Backend = "auto"
) -> Float[Array, "M D"]:
    """The sum over the first axis, in the dtype of the leaves (f32 or bf16).

    Raises:
        KernelError: a dtype or rank that is not supported, no leaf, or no such implementation.
    """
    if leaves_GMD.dtype.name not in DTYPES:
        raise KernelError(
            f"ordered_sum: dtype {leaves_GMD.dtype}; supported are {', '.join(DTYPES)}"
        )
    if leaves_GMD.ndim != 3 or leaves_GMD.shape[0] == 0:
        raise KernelError(f"ordered_sum: leaves {leaves_GMD.shape}; need [G, M, D] with G >= 1")
    return _sum(leaves_GMD, resolve("ordered_sum", implementation, KINDS))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(leaves_GMD, backend):
    return forward(leaves_GMD, backend)


def _fwd(leaves_GMD, backend):
    return _sum(leaves_GMD, backend), leaves_GMD.shape[0]


def _bwd(backend, n_leaves, d_MD):
    return (jnp.broadcast_to(d_MD[None], (n_leaves, *d_MD.shape)),)


_sum.defvjp(_fwd, _bwd)


def forward(leaves_GMD: Array, backend: Backend) -> Array:
    """The sum on one backend."""
    if 0 in leaves_GMD.shape:
        return jnp.zeros(leaves_GMD.shape[1:], leaves_GMD.dtype)
    if backend.kind == "tpu":
        return pallas_tpu.total(leaves_GMD, backend.interpret)
    return xla.total(leaves_GMD)
