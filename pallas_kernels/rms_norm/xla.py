"""What is computed of a tile of rows: the twin as it stands, and the body of the TPU kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels.row_sum import row_sum


def scale(x_RD: jax.Array, gain_1D: jax.Array, eps: float, row_sum=row_sum) -> jax.Array:
    """`gain * x / sqrt(mean(x^2) + eps)` in f32; `x` is f32."""
    mean_R1 = row_sum(x_RD * x_RD) / x_RD.shape[1]
    return x_RD * jax.lax.rsqrt(mean_R1 + eps) * gain_1D


def norm(x_RD: jax.Array, gain_1D: jax.Array, eps: float) -> tuple[jax.Array, ...]:
    """Rounded once to the dtype of `x`."""
    y_RD = scale(x_RD.astype(jnp.float32), gain_1D.astype(jnp.float32), eps)
    return (y_RD.astype(x_RD.dtype),)


def add_norm(
    residual_RD: jax.Array, branch_RD: jax.Array, gain_1D: jax.Array, eps: float
) -> tuple[jax.Array, ...]:
    """The norm reads the unrounded f32 sum, which is also returned, rounded."""
    dtype = residual_RD.dtype
    sum_RD = residual_RD.astype(jnp.float32) + branch_RD.astype(jnp.float32)
    y_RD = scale(sum_RD, gain_1D.astype(jnp.float32), eps)
    return y_RD.astype(dtype), sum_RD.astype(dtype)


def gradient(
    x_RD: jax.Array, dy_RD: jax.Array, gain_1D: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `x` (f32) and of the gain in each row (f32)."""
    x_RD, dy_RD = x_RD.astype(jnp.float32), dy_RD.astype(jnp.float32)
    width = x_RD.shape[1]
    root_R1 = jax.lax.rsqrt(row_sum(x_RD * x_RD) / width + eps)
    unit_RD = x_RD * root_R1
    d_unit_RD = dy_RD * gain_1D.astype(jnp.float32)
    inner_R1 = row_sum(d_unit_RD * unit_RD) / width
    return root_R1 * (d_unit_RD - unit_RD * inner_R1), dy_RD * unit_RD
