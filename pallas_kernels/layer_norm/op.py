"""LayerNorm of each row, as the indexer norms its keys.

Numerics contract. Mean and variance (of the centred row) are sums of the whole row (`row_sum`);
all f32, one rounding at the end. Bits depend on the row alone; tiles of the kernel change none. The
gradient's means are such sums too, those of gain and bias are products with ones over rows in the
leaves of `pinned_matmul`. The model stops the gradient before the indexer and does not ask for it.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import rowwise
from pallas_kernels.backend import Backend, Implementation, resolve
from pallas_kernels.layer_norm import xla
from pallas_kernels.pinned_matmul.op import contract
from pallas_kernels.pinned_matmul.order import Order
from pallas_kernels.rms_norm.op import check

KINDS = ("xla", "tpu")


def layer_norm(
    x_MD: Float[Array, "M D"],
    gain_D: Float[Array, "D"],
    bias_D: Float[Array, "D"],
    *,
    eps: float,
    implementation: Implementation | Backend = "auto",
) -> Float[Array, "M D"]:
    """LayerNorm of each row, in the dtype of `x` (f32 or bf16).

    Raises:
        KernelError: a dtype or shape that is not supported, or no such implementation.
    """
    check("layer_norm", x_MD, gain_D, bias_D)
    return _norm(x_MD, gain_D, bias_D, eps, resolve("layer_norm", implementation, KINDS))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _norm(x_MD, gain_D, bias_D, eps, backend):
    return forward(x_MD, gain_D, bias_D, eps, backend)


def _fwd(x_MD, gain_D, bias_D, eps, backend):
    return _norm(x_MD, gain_D, bias_D, eps, backend), (x_MD, gain_D, bias_D)


def _bwd(eps, backend, saved, dy_MD):
    x_MD, gain_D, bias_D = saved
    dx_MD, d_gain_D, d_bias_D = gradient(x_MD, dy_MD, gain_D, eps, backend)
    return (
        dx_MD.astype(x_MD.dtype),
        d_gain_D.astype(gain_D.dtype),
        d_bias_D.astype(bias_D.dtype),
    )


_norm.defvjp(_fwd, _bwd)


def forward(x_MD: Array, gain_D: Array, bias_D: Array, eps: float, backend: Backend) -> Array:
    """The norm on one backend."""
    out = [jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype)]
    body = functools.partial(xla.norm, eps=eps)
    constants = [gain_D[None], bias_D[None]]
    return rowwise.apply("layer_norm", body, [x_MD], constants, out, backend)[0]


def gradient(
    x_MD: Array, dy_MD: Array, gain_D: Array, eps: float, backend: Backend
) -> tuple[Array, Array, Array]:
    """Gradients of `x`, the gain and the bias, all f32."""
    out = [jax.ShapeDtypeStruct(x_MD.shape, jnp.float32)] * 2
    body = functools.partial(xla.gradient, eps=eps)
    rows, constants = [x_MD, dy_MD], [gain_D[None]]
    dx_MD, d_gain_MD = rowwise.apply("layer_norm", body, rows, constants, out, backend)
    order = Order()
    ones = jnp.ones((x_MD.shape[0], 8), jnp.float32)
    # One product: XLA would merge two that share an operand, where a kernel cannot.
    both_MD = jnp.concatenate([d_gain_MD, dy_MD.astype(jnp.float32)], axis=1)
    both = contract(ones, both_MD, "tn", order, order.row_leaf, "float32", backend)[0]
    d_gain_D, d_bias_D = jnp.split(both, 2)
    return dx_MD, d_gain_D, d_bias_D
