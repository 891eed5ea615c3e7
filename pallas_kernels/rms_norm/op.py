"""RMSNorm, alone or of a residual stream and the branch that is added to it.

Numerics contract. Statistics, gain and the residual sum are f32; the mean of squares is a sum
of the whole row (`row_sum`); one rounding at the end. `add_rms_norm` norms the unrounded f32 sum.
The gradient of the input is rounded once; that of the gain is, for every leaf of 128 rows, a
product with ones, added in the tree of `pinned_matmul`. Bits depend on the
row alone; tiles of the kernel change none.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import rowwise
from pallas_kernels.backend import Backend, Implementation, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.pinned_matmul.op import contract
from pallas_kernels.pinned_matmul.order import Order
from pallas_kernels.rms_norm import xla

KINDS = ("xla", "tpu")
"""Implementations of the forward and of the gradients."""
DTYPES = ("float32", "bfloat16")


def rms_norm(
    x_MD: Float[Array, "M D"],
    gain_D: Float[Array, "D"],
    *,
    eps: float,
    implementation: Implementation | Backend = "auto",
) -> Float[Array, "M D"]:
    """RMSNorm of each row, in the dtype of `x` (f32 or bf16).

    Raises:
        KernelError: a dtype or shape that is not supported, or no such implementation.
    """
    check("rms_norm", x_MD, gain_D)
    return _norm(x_MD, gain_D, eps, resolve("rms_norm", implementation, KINDS))


def add_rms_norm(
    residual_MD: Float[Array, "M D"],
    branch_MD: Float[Array, "M D"],
    gain_D: Float[Array, "D"],
    *,
    eps: float,
    implementation: Implementation | Backend = "auto",
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """Adds a branch to the residual stream and norms the unrounded sum.

    Returns:
        normed, residual: both in the dtype of `residual`.

    Raises:
        KernelError: as `rms_norm`; or the branch does not fit the residual.
    """
    check("rms_norm", residual_MD, gain_D)
    if branch_MD.shape != residual_MD.shape or branch_MD.dtype != residual_MD.dtype:
        raise KernelError(
            f"rms_norm: branch {branch_MD.dtype}{branch_MD.shape} does not fit residual "
            f"{residual_MD.dtype}{residual_MD.shape}"
        )
    backend = resolve("rms_norm", implementation, KINDS)
    return _add_norm(residual_MD, branch_MD, gain_D, eps, backend)


def check(op: str, x: Array, *gains: Array) -> None:
    """Refuses what the norms do not do."""
    if x.dtype.name not in DTYPES:
        raise KernelError(f"{op}: dtype {x.dtype}; supported are {', '.join(DTYPES)}")
    if x.ndim != 2 or any(gain.shape != x.shape[1:] for gain in gains) or x.shape[1] == 0:
        shapes = ", ".join(str(gain.shape) for gain in gains)
        raise KernelError(f"{op}: x {x.shape} does not fit gain {shapes} [D]")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _norm(x_MD, gain_D, eps, backend):
    return forward(x_MD, gain_D, eps, backend)


def forward(x_MD: Array, gain_D: Array, eps: float, backend: Backend) -> Array:
    """The norm on one backend."""
    out = [jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype)]
    body = functools.partial(xla.norm, eps=eps)
    return rowwise.apply("rms_norm", body, [x_MD], [gain_D[None]], out, backend)[0]


def gradient(
    x_MD: Array, dy_MD: Array, gain_D: Array, eps: float, backend: Backend
) -> tuple[Array, Array]:
    """Gradients of `x` and of the gain, both f32."""
    out = [jax.ShapeDtypeStruct(x_MD.shape, jnp.float32)] * 2
    body = functools.partial(xla.gradient, eps=eps)
    rows, constants = [x_MD, dy_MD], [gain_D[None]]
    dx_MD, d_gain_MD = rowwise.apply("rms_norm", body, rows, constants, out, backend)
    order, n_rows = Order(), x_MD.shape[0]
    ones = jnp.ones((n_rows, 8), jnp.float32)
    d_gain = contract(ones, d_gain_MD, "tn", order, order.row_leaf, "float32", backend)
    return dx_MD, d_gain[0]


def _fwd(x_MD, gain_D, eps, backend):
    return _norm(x_MD, gain_D, eps, backend), (x_MD, gain_D)


def _bwd(eps, backend, saved, dy_MD):
    x_MD, gain_D = saved
    dx_MD, d_gain_D = gradient(x_MD, dy_MD, gain_D, eps, backend)
    return dx_MD.astype(x_MD.dtype), d_gain_D.astype(gain_D.dtype)


_norm.defvjp(_fwd, _bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add_norm(residual_MD, branch_MD, gain_D, eps, backend):
    return add_forward(residual_MD, branch_MD, gain_D, eps, backend)


def add_forward(
    residual_MD: Array, branch_MD: Array, gain_D: Array, eps: float, backend: Backend
) -> tuple[Array, Array]:
    """The sum and its norm on one backend."""
    out = [jax.ShapeDtypeStruct(residual_MD.shape, residual_MD.dtype)] * 2
    body = functools.partial(xla.add_norm, eps=eps)
    rows, constants = [residual_MD, branch_MD], [gain_D[None]]
    normed_MD, sum_MD = rowwise.apply("rms_norm", body, rows, constants, out, backend)
    return normed_MD, sum_MD


def _add_fwd(residual_MD, branch_MD, gain_D, eps, backend):
    results = _add_norm(residual_MD, branch_MD, gain_D, eps, backend)
    return results, (residual_MD, branch_MD, gain_D)


def _add_bwd(eps, backend, saved, d_out):
    residual_MD, branch_MD, gain_D = saved
    d_normed_MD, d_sum_MD = d_out
    sum_MD = residual_MD.astype(jnp.float32) + branch_MD.astype(jnp.float32)
    dx_MD, d_gain_D = gradient(sum_MD, d_normed_MD, gain_D, eps, backend)
    d_MD = (dx_MD + d_sum_MD.astype(jnp.float32)).astype(residual_MD.dtype)
    return d_MD, d_MD, d_gain_D.astype(gain_D.dtype)


_add_norm.defvjp(_add_fwd, _add_bwd)
