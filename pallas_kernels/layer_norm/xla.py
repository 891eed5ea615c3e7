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


def gradient(
    x_RD: jax.Array, dy_RD: jax.Array, gain_1D: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `x` (f32) and of the gain in each row (f32); that of the bias is `dy`."""
    x_RD, dy_RD = x_RD.astype(jnp.float32), dy_RD.astype(jnp.float32)
    width = x_RD.shape[1]
    centred_RD = x_RD - row_sum(x_RD) / width
    root_R1 = jax.lax.rsqrt(row_sum(centred_RD * centred_RD) / width + eps)
    unit_RD = centred_RD * root_R1

    def apart(product_RD):
        # A select that always holds: without it a product and the sum that it enters are contracted
        # in the twin and not in the kernel, or the other way round.
        return jnp.where(root_R1 > 0, product_RD, 0.0)

    d_unit_RD = apart(dy_RD * gain_1D.astype(jnp.float32))
    mean_R1 = row_sum(d_unit_RD) / width
    inner_R1 = row_sum(d_unit_RD * unit_RD) / width
    return root_R1 * (d_unit_RD - mean_R1 - apart(unit_RD * inner_R1)), dy_RD * unit_RD
