"""Backward of the mixing of latents, one chunk of queries against its whole sequence.

    w = softmax over the selected keys of (q . k * scale);   o = w v,   v = first K columns of k
    dw = do . v;   ds = w (dw - sum w dw);   dq = ds k * scale;   dk = ds^T q * scale + [w^T do | 0]

The forward gathers each token's list; here the same mixture is a dense product under the list's
mask, so that the gradient of the keys is a product too and no scatter adds anything.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.numerics.arithmetic import batched_dot


def listed_mask(
    ids_ck: Int[Array, "c k"], n_keys: int, padding: int | Int[Array, ""]
) -> Bool[Array, "c S"]:
    """Marks the listed keys; ids from `padding` on are no keys."""
    row_ck = jnp.broadcast_to(jnp.arange(ids_ck.shape[0])[:, None], ids_ck.shape)
    id_ck = jnp.where(ids_ck < padding, ids_ck, n_keys)
    # Each entry is written at most once.
    return jnp.zeros((ids_ck.shape[0], n_keys), bool).at[row_ck, id_ck].set(True, mode="drop")


def mix_vjp(
    query_cNC: Float[Array, "c N C"],
    keys_SC: Float[Array, "S C"],
    listed_cS: Bool[Array, "c S"],
    d_cNK: Float[Array, "c N K"],
    scale: float,
) -> tuple[Float[Array, "c N C"], Float[Array, "S C"]]:
    """Gradients of the queries and of the keys (f32), given that of the mixed latents."""
    rank, dtype = d_cNK.shape[2], keys_SC.dtype
    values_SK = keys_SC[:, :rank]
    score_cNS = batched_dot("cnx,sx->cns", query_cNC, keys_SC) * scale
    score_cNS = jnp.where(listed_cS[:, None, :], score_cNS, -jnp.inf)
    peak = jnp.max(score_cNS, axis=-1, keepdims=True)
    weight = jnp.exp(score_cNS - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight / jnp.where(total == 0.0, 1.0, total)
    d_weight = batched_dot("cnk,sk->cns", d_cNK, values_SK)
    inner = jnp.sum(weight * d_weight, axis=-1, keepdims=True)
    d_score = (weight * (d_weight - inner) * scale).astype(dtype)
    d_query = batched_dot("cns,sx->cnx", d_score, keys_SC)
    d_keys = batched_dot("cns,cnx->sx", d_score, query_cNC)
    d_values = batched_dot("cns,cnk->sk", weight.astype(dtype), d_cNK)
    return d_query, d_keys + jnp.pad(d_values, ((0, 0), (0, d_keys.shape[1] - rank)))
