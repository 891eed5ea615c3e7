"""What is computed of a tile of rows: the twin as it stands, and the body of the TPU kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels.row_sum import row_sum


def norm(
    x_RD: jax.Array, gain_1D: jax.Array, bias_1D: jax.Array, eps: float, row_sum=row_sum
) -> tuple[jax.Array, ...]:
    """LayerNorm with biased variance and f32 statistics, rounded once to the dtype of `x`."""
    x32_RD, width = x_RD.astype(jnp.float32), x_RD.shape[1]
    centred_RD = x32_RD - row_sum(x32_RD) / width
    variance_R1 = row_sum(centred_RD * centred_RD) / width
    gain_1D, bias_1D = gain_1D.astype(jnp.float32), bias_1D.astype(jnp.float32)
    y_RD = centred_RD * jax.lax.rsqrt(variance_R1 + eps) * gain_1D + bias_1D
    return (y_RD.astype(x_RD.dtype),)
