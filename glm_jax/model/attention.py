"""Multi-head latent attention in absorbed form: one shared key of width C = K + R a position.

    c_q = RMS(x W_qa);  q_n = [q_nope | q_rope] = c_q W_qb;   [c' | k'] = x W_kva
    c = RMS(c');  k = RoPE(k');   a_n(t, s) = (W_UK,n^T q_nope . c_s + RoPE(q_rope) . k_s) * scale
    o_n = W_UV,n sum_s softmax_s(a_n) c_s;   y = W_o [o_1 ... o_N]

The scale is (nope + rope)^-0.5, also in absorbed form.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from glm_jax.config import GlmConfig
from glm_jax.numerics.arithmetic import Arithmetic, batched_dot
from glm_jax.numerics.primitives import rms_norm, rope
from glm_jax.params import ONES, Normal, declare
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.sparse_attention import xla as sparse_xla


class Projected(NamedTuple):
    """What attention needs of each token."""

    query_RNC: Float[Array, "R N C"]
    """Absorbed query [W_UK^T q_nope | RoPE(q_rope)]."""
    latent_RC: Float[Array, "R C"]
    """The token's own cache row [c | RoPE(k')]."""
    query_latent_RQ: Float[Array, "R Q"]
    """Normalised query latent, which the indexer reads too."""


class Attention(nnx.Module):
    """Parameters of one (stack of) attention layers and the two halves around the key access."""

    def __init__(self, cfg: GlmConfig, *, stack: tuple[int, ...] = ()):
        self.cfg = cfg
        d, n, q, k = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
        nope, v = cfg.qk_nope_head_dim, cfg.v_head_dim
        init, dtype = Normal(cfg.initializer_range), cfg.dtype

        def weight(shape, axes):
            return declare(shape, axes, init, dtype, stack=stack)

        def gain(width, axis):
            return declare((width,), (axis,), ONES, dtype, stack=stack)

        self.q_a = weight((d, q), ("embed", "q_lora"))
        self.q_a_norm = gain(q, "q_lora")
        self.q_b = weight((q, n, cfg.qk_head_dim), ("q_lora", "heads", "qk_head"))
        self.kv_a = weight((d, cfg.cache_width), ("embed", "cache"))
        self.kv_a_norm = gain(k, "kv_lora")
        self.k_up = weight((n, nope, k), ("heads", "nope_head", "kv_lora"))
        self.v_up = weight((n, k, v), ("heads", "kv_lora", "v_head"))
        self.o = weight((n, v, d), ("heads", "v_head", "embed"))

    def project(
        self, ops: Arithmetic, x_RD: Float[Array, "R D"], angles: tuple[Array, Array]
    ) -> Projected:
        """Queries and cache rows of the tokens; `angles` are cos and sin, `[R, rope/2]` each."""
        cfg = self.cfg
        eps = cfg.latent_norm_eps
        query_latent_RQ = rms_norm(ops, ops.matmul(x_RD, self.q_a[...]), self.q_a_norm[...], eps)
        q_RNH = ops.matmul(query_latent_RQ, self.q_b[...])
        nope_RNP, rope_RNr = jnp.split(q_RNH, [cfg.qk_nope_head_dim], axis=-1)
        absorbed_RNK = ops.matmul_by_head(nope_RNP, self.k_up[...])
        query_RNC = jnp.concatenate([absorbed_RNK, rope(rope_RNr, *angles)], axis=-1)

        kv_RC = ops.matmul(x_RD, self.kv_a[...])
        content_RK, key_Rr = jnp.split(kv_RC, [cfg.kv_lora_rank], axis=-1)
        content_RK = rms_norm(ops, content_RK, self.kv_a_norm[...], eps)
        latent_RC = jnp.concatenate([content_RK, rope(key_Rr, *angles)], axis=-1)
        return Projected(query_RNC, latent_RC, query_latent_RQ)

    def output(self, ops: Arithmetic, mixed_RNK: Float[Array, "R N K"]) -> Float[Array, "R D"]:
        """Un-absorbs the mixed latents and projects to the model width."""
        heads_RNV = ops.matmul_by_head(mixed_RNK, self.v_up[...])
        return ops.matmul(heads_RNV, self.o[...])


def attend_masked(
    query_GRNC: Float[Array, "G R N C"],
    keys_GSC: Float[Array, "G S C"],
    allowed_GRS: Bool[Array, "G R S"],
    *,
    scale: float,
    rank: int,
) -> Float[Array, "G R N K"]:
    """Mixes the latents of the allowed keys; every group of rows has its own keys.

    A row without an allowed key (padding) gets zeros. `rank` is K; the first K of the C columns
    are the values.
    """
    score_GRNS = batched_dot("grnc,gsc->grns", query_GRNC, keys_GSC) * scale
    weight_GRNS = _masked_softmax(score_GRNS, allowed_GRS[:, :, None, :])
    weight_GRNS = weight_GRNS.astype(keys_GSC.dtype)
    mixed_GRNK = batched_dot("grns,gsk->grnk", weight_GRNS, keys_GSC[:, :, :rank])
    return mixed_GRNK.astype(keys_GSC.dtype)


def attend_gathered(
    ops: Arithmetic,
    query_RNC: Float[Array, "R N C"],
    keys_RkC: Float[Array, "R k C"],
    allowed_Rk: Bool[Array, "R k"],
    *,
    scale: float,
    rank: int,
) -> Float[Array, "R N K"]:
    """As `attend_masked`, with each row's own list of `k` gathered keys.

    The products of a row have the shape `[N, C] x [C, k]` and `[N, k] x [k, K]` whatever the batch.
    """
    backend = ops.backend("sparse_attention")
    if backend.kind == "xla":
        return sparse_xla.attend(
            query_RNC, keys_RkC, allowed_Rk, scale=scale, rank=rank, row_sum=ops.row_sum
        )
    return sparse_attention(
        query_RNC, keys_RkC, allowed_Rk, scale=scale, rank=rank, implementation=backend
    )


def _masked_softmax(score: Array, allowed: Array) -> Array:
    """f32 softmax over the last axis among the allowed entries; zeros where none is allowed."""
    score = jnp.where(allowed, score, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
    weight = jnp.exp(score - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return weight / jnp.where(total == 0.0, 1.0, total)


def gather_keys(keys_GSC: Float[Array, "G S C"], ids_GRk: Int[Array, "G R k"]) -> Array:
    """Rows of each group's keys by position, `[G, R, k, C]`; out-of-range positions read zeros."""
    return jax.vmap(lambda keys_SC, ids_Rk: keys_SC.at[ids_Rk].get(mode="fill", fill_value=0))(
        keys_GSC, ids_GRk
    )
