"""Fixed-order XLA twin: what the model runs on a CPU, and the body of the TPU kernel."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.row_sum import row_sum


def attend(
    query_RNC: jax.Array,
    keys_RkC: jax.Array,
    listed_Rk: jax.Array,
    *,
    scale: float,
    rank: int,
    row_sum=row_sum,
    precision: lax.Precision | None = lax.Precision.HIGHEST,
) -> jax.Array:
    """Mixes each row's listed keys; the first `rank` columns of a key are its value.

    The products of a row have the shape `[N, C] x [C, k]` and `[N, k] x [k, C]` whatever the batch.
    """

    def product(spec, a, b):
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    score_RNk = product("rnc,rkc->rnk", query_RNC, keys_RkC) * scale
    # The select also keeps maximum, exp and scale in separate programs (docs/numerics.md).
    score_RNk = jnp.where(listed_Rk[:, None, :], score_RNk, -jnp.inf)
    peak_RN1 = lax.stop_gradient(jnp.max(score_RNk, axis=-1, keepdims=True))
    weight_RNk = jnp.exp(score_RNk - jnp.where(jnp.isfinite(peak_RN1), peak_RN1, 0.0))
    weight_RNk = weight_RNk.astype(keys_RkC.dtype)
    mixed_RNK = product("rnk,rkc->rnc", weight_RNk, keys_RkC)[:, :, :rank]
    total_RN1 = row_sum(weight_RNk.astype(jnp.float32).reshape(-1, weight_RNk.shape[2]))
    total_RN1 = total_RN1.reshape(*weight_RNk.shape[:2], 1)
    # A row without a key has weights of exactly 0.
    return (mixed_RNK / jnp.where(total_RN1 == 0.0, 1.0, total_RN1)).astype(keys_RkC.dtype)
