"""Fixed-order XLA twin: what the model runs on a CPU, and the bodies of the TPU kernels."""

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


def gradient(
    query_RNC: jax.Array,
    keys_RkC: jax.Array,
    listed_Rk: jax.Array,
    d_RNK: jax.Array,
    *,
    scale: float,
    rank: int,
    precision: lax.Precision | None = lax.Precision.HIGHEST,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of each row's query and of its listed keys, in the dtype of the keys.

    With P the weights over their sum, and S the scores: dP = d V^T, dS = P (dP - sum_k P dP)
    times the scale, dq = dS K, dK = dS^T q + [P^T d | 0]. A key that is not listed gets exactly +0.
    Each row's keys are its own copies, so nothing is scattered.
    """

    def product(spec, a, b):
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    dtype, (n_rows, n_heads, width) = keys_RkC.dtype, query_RNC.shape
    shown_R1k = listed_Rk[:, None, :]
    score_RNk = product("rnc,rkc->rnk", query_RNC, keys_RkC) * scale
    score_RNk = jnp.where(shown_R1k, score_RNk, -jnp.inf)
    peak_RN1 = jnp.max(score_RNk, axis=-1, keepdims=True)
    weight_RNk = jnp.exp(score_RNk - jnp.where(jnp.isfinite(peak_RN1), peak_RN1, 0.0))
    weight_RNk = weight_RNk.astype(dtype).astype(jnp.float32)

    def sums(x_RNk):
        total = row_sum(x_RNk.reshape(n_rows * n_heads, -1))
        return total.reshape(n_rows, n_heads, 1)

    total_RN1 = sums(weight_RNk)
    weight_RNk = weight_RNk / jnp.where(total_RN1 == 0.0, 1.0, total_RN1)
    d_weight_RNk = product("rnc,rkc->rnk", d_RNK, keys_RkC[:, :, :rank])
    mean_RN1 = sums(weight_RNk * d_weight_RNk)
    # Scaled before it is rounded: a scale of the product would be contracted with the sum below.
    d_score_RNk = (weight_RNk * (d_weight_RNk - mean_RN1) * scale).astype(dtype)
    dq_RNC = product("rnk,rkc->rnc", d_score_RNk, keys_RkC)
    dk_RkC = product("rnk,rnc->rkc", d_score_RNk, query_RNC)
    dv_RkK = product("rnk,rnc->rkc", weight_RNk.astype(dtype), d_RNK)
    if rank < width:
        dv_RkK = jnp.pad(dv_RkK, ((0, 0), (0, 0), (0, width - rank)))
    return dq_RNC.astype(dtype), (dk_RkC + dv_RkK).astype(dtype)
