"""Norms, rotation and activation: f32 inside, one rounding to the dtype of the activations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.numerics.arithmetic import Arithmetic
from pallas_kernels.layer_norm import xla as layer_xla
from pallas_kernels.rms_norm import xla as rms_xla


def rms_scale(
    ops: Arithmetic, x_RD: Float[Array, "R D"], gain_D: Float[Array, "D"], eps: float
) -> Float[Array, "R D"]:
    """`gain * x / sqrt(mean(x^2) + eps)` in f32; the result is f32 and still to be rounded."""
    gain_RD = ops.spread(gain_D, x_RD.shape[0])
    return rms_xla.scale(x_RD.astype(jnp.float32), gain_RD, eps, row_sum=ops.row_sum)


def rms_norm(
    ops: Arithmetic, x_RD: Float[Array, "R D"], gain_D: Float[Array, "D"], eps: float
) -> Float[Array, "R D"]:
    """RMSNorm with f32 statistics and gain, rounded once to the dtype of `x`."""
    return rms_scale(ops, x_RD, gain_D, eps).astype(x_RD.dtype)


def add_rms_norm(
    ops: Arithmetic,
    residual_RD: Float[Array, "R D"],
    branch_RD: Float[Array, "R D"],
    gain_D: Float[Array, "D"],
    eps: float,
) -> tuple[Array, Array]:
    """Adds a branch to the residual stream and norms the sum.

    The norm reads the unrounded f32 sum, as the serving engines do; the stream stores it rounded.

    Returns:
        normed, residual: both `[R, D]` in the dtype of `residual`.
    """
    sum_RD = residual_RD.astype(jnp.float32) + branch_RD.astype(jnp.float32)
    dtype = residual_RD.dtype
    return rms_scale(ops, sum_RD, gain_D, eps).astype(dtype), sum_RD.astype(dtype)


def layer_norm(
    ops: Arithmetic,
    x_RD: Float[Array, "R D"],
    gain_D: Float[Array, "D"],
    bias_D: Float[Array, "D"],
    eps: float,
) -> Float[Array, "R D"]:
    """LayerNorm with biased variance and f32 statistics, rounded once to the dtype of `x`."""
    (y_RD,) = layer_xla.norm(x_RD, gain_D[None, :], bias_D[None, :], eps, row_sum=ops.row_sum)
    return y_RD


def rope_angles(
    positions_R: Int[Array, "R"], width: int, theta: float
) -> tuple[Float[Array, "R W"], Float[Array, "R W"]]:
    """Cosine and sine of `position * theta^(-2j/width)` for j < width/2, f32."""
    frequency_W = jnp.asarray(
        [theta ** (-2 * j / width) for j in range(width // 2)], dtype=jnp.float32
    )
    phase_RW = positions_R.astype(jnp.float32)[:, None] * frequency_W[None, :]
    return jnp.cos(phase_RW), jnp.sin(phase_RW)


def rope(x: Float[Array, "R ... W2"], cos_RW: Array, sin_RW: Array) -> Array:
    """Rotates the pairs (0, 1), (2, 3), ... of the last axis; computed in f32, rounded once."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    middle = (1,) * (x.ndim - 2)
    cos = cos_RW.reshape(cos_RW.shape[0], *middle, cos_RW.shape[1])
    sin = sin_RW.reshape(sin_RW.shape[0], *middle, sin_RW.shape[1])
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def swiglu(gate_up_RGF: Float[Array, "R 2 F"]) -> Array:
    """`silu(gate) * up` in f32, rounded once. Axis 1 holds gate, then up."""
    gate_RF, up_RF = (
        gate_up_RGF[:, 0, :].astype(jnp.float32),
        gate_up_RGF[:, 1, :].astype(jnp.float32),
    )
    return (gate_RF * jax.nn.sigmoid(gate_RF) * up_RF).astype(gate_up_RGF.dtype)
