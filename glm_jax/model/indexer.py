"""The sparse indexer: which past tokens a token attends.

    q_i = RoPE(c_q W_qb)_i;   k = RoPE(LN(x W_k));   w = x W_w * I^-0.5
    score(t, s) = sum_i w_i(t) * relu(q_i(t) . k(s) * J^-0.5)          f32
    selected(t) = the index_topk largest scores among s <= t; ties to the lowest s

RoPE turns the first `qk_rope_head_dim` of the J dims. No gradient passes through the selection.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from glm_jax.config import GlmConfig
from glm_jax.numerics.arithmetic import Arithmetic, batched_dot
from glm_jax.numerics.primitives import layer_norm, rope
from glm_jax.params import ONES, ZEROS, Normal, declare
from pallas_kernels.indexer_scores.xla import weigh_heads


class IndexQuery(NamedTuple):
    """What the indexer needs of each token."""

    query_RIJ: Float[Array, "R I J"]
    weight_RI: Float[Array, "R I"]
    """Signed head weights, f32."""
    key_RJ: Float[Array, "R J"]
    """The token's own index-cache row."""


class Indexer(nnx.Module):
    """Parameters of one (stack of) indexers and their projections."""

    def __init__(self, cfg: GlmConfig, *, stack: tuple[int, ...] = ()):
        self.cfg = cfg
        d, q, i, j = cfg.hidden_size, cfg.q_lora_rank, cfg.index_n_heads, cfg.index_head_dim
        init, dtype = Normal(cfg.initializer_range), cfg.dtype

        def declared(shape, axes, init):
            return declare(shape, axes, init, dtype, stack=stack)

        self.q_b = declared((q, i, j), ("q_lora", "index_heads", "index_head"), init)
        self.k = declared((d, j), ("embed", "index_head"), init)
        self.k_norm = declared((j,), ("index_head",), ONES)
        self.k_norm_bias = declared((j,), ("index_head",), ZEROS)
        self.head_weight = declared((d, i), ("embed", "index_heads"), init)

    def project(
        self,
        ops: Arithmetic,
        x_RD: Float[Array, "R D"],
        query_latent_RQ: Float[Array, "R Q"],
        angles: tuple[Array, Array],
    ) -> IndexQuery:
        """Index queries, head weights and keys of the tokens, from the normed inputs."""
        cfg = self.cfg
        x_RD, query_latent_RQ = jax.lax.stop_gradient((x_RD, query_latent_RQ))
        query_RIJ = ops.matmul(query_latent_RQ, self.q_b[...])
        key_RJ = layer_norm(
            ops,
            ops.matmul(x_RD, self.k[...]),
            self.k_norm[...],
            self.k_norm_bias[...],
            cfg.index_norm_eps,
        )
        weight_RI = ops.matmul(x_RD, self.head_weight[...], out=jnp.float32)
        return IndexQuery(
            _rotate_first(query_RIJ, cfg.qk_rope_head_dim, angles),
            weight_RI * cfg.index_n_heads**-0.5,
            _rotate_first(key_RJ, cfg.qk_rope_head_dim, angles),
        )


def _rotate_first(x: Array, width: int, angles: tuple[Array, Array]) -> Array:
    return jnp.concatenate([rope(x[..., :width], *angles), x[..., width:]], axis=-1)


def index_scores(
    query_GRIJ: Float[Array, "G R I J"],
    weight_GRI: Float[Array, "G R I"],
    keys_GSJ: Float[Array, "G S J"],
    causal_GRS: Bool[Array, "G R S"],
) -> Float[Array, "G R S"]:
    """f32 scores of every key for every row of its group, -inf where not causal."""
    dot_GRIS = batched_dot("grij,gsj->gris", query_GRIJ, keys_GSJ)
    score_GRS = weigh_heads(dot_GRIS, weight_GRI, query_GRIJ.shape[-1])
    return jnp.where(causal_GRS, score_GRS, -jnp.inf)
