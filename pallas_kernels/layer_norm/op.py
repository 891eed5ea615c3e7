"""LayerNorm of each row, as the indexer norms its keys.

Numerics contract. Mean and variance (of the centred row) are sums of the whole row (`row_sum`);
all f32, one rounding at the end. Bits depend on the row
alone; tiles of the kernel change none. There is no gradient: the model stops it before the indexer.
"""

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels import rowwise
from pallas_kernels.backend import Backend, Implementation, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.layer_norm import xla
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
        KernelError: a dtype or shape that is not supported, no such implementation, or its gradient
            is asked for.
    """
    check("layer_norm", x_MD, gain_D, bias_D)
    return _norm(x_MD, gain_D, bias_D, eps, resolve("layer_norm", implementation, KINDS))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _norm(x_MD, gain_D, bias_D, eps, backend):
    return forward(x_MD, gain_D, bias_D, eps, backend)


def _fwd(x_MD, gain_D, bias_D, eps, backend):
    raise KernelError("layer_norm: gradient: there is none; stop it before the norm")


def _bwd(eps, backend, saved, dy):
    raise AssertionError("not reached: the forward rule refuses")


_norm.defvjp(_fwd, _bwd)


def forward(x_MD: Array, gain_D: Array, bias_D: Array, eps: float, backend: Backend) -> Array:
    """The norm on one backend."""
    out = [jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype)]
    body = functools.partial(xla.norm, eps=eps)
    constants = [gain_D[None], bias_D[None]]
    return rowwise.apply("layer_norm", body, [x_MD], constants, out, backend)[0]
