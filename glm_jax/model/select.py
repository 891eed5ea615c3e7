"""Reading the keys: index scores, selection, and mixing of the selected latents.

Pinned arithmetic treats every token by itself: its products have shapes that follow from the config
alone, so that a token's bits do not depend on who else is in the batch. Native arithmetic works on
runs of tokens that share a slot.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from glm_jax.cache import slot_keys
from glm_jax.config import GlmConfig
from glm_jax.model.attention import attend_gathered, attend_masked, gather_keys
from glm_jax.model.context import Context
from glm_jax.model.indexer import IndexQuery, index_scores
from pallas_kernels.indexer_scores.xla import paged_scores
from pallas_kernels.top_k_select import mask_to_ids, select_mask


def select_keys(
    cfg: GlmConfig, context: Context, query: IndexQuery, index_keys: Array, layer: int | Array
) -> tuple[Array, Array | None]:
    """Selects each token's keys.

    Args:
        cfg: the model's config.
        context: this forward's.
        query: index queries and head weights of all tokens.
        index_keys: the cache's index pages, or without a cache the tokens' own keys `[T, J]`.
        layer: this layer's number among them.

    Returns:
        The selection (see `Stream.selection`) and, in native arithmetic, the scores.
    """
    if context.causal_GRS is not None:
        return _select_native(cfg, context, query, index_keys, layer)

    def region(query_RIJ, weight_RI, pages_Rp, position_R, valid_R):
        score_RS = paged_scores(query_RIJ, weight_RI, index_keys, layer, pages_Rp, position_R)
        causal_RS = _up_to(position_R, valid_R, score_RS.shape[1])
        mask_RS = select_mask(score_RS, cfg.index_topk) & causal_RS
        return mask_to_ids(mask_RS, cfg.index_topk)

    batch = context.batch
    ids_Tk = context.rows(
        region,
        query.query_RIJ,
        query.weight_RI,
        context.pages_Tp,
        batch.positions_T,
        batch.valid_T,
    )
    return ids_Tk, None


def mix(
    cfg: GlmConfig,
    context: Context,
    query_TNC: Float[Array, "T N C"],
    latent: Array,
    layer: int | Array,
    selection: Array,
) -> Float[Array, "T N K"]:
    """Attention of each token over its selected keys, in the latent space.

    `latent` are the cache's pages, or without a cache the tokens' own rows `[T, C]`.
    """
    sizes = {"scale": cfg.softmax_scale, "rank": cfg.kv_lora_rank}
    if context.causal_GRS is not None:
        return _mix_native(context, query_TNC, latent, layer, selection, sizes)

    def region(query_RNC, ids_Rk, pages_Rp, position_R):
        size = latent.shape[2]
        listed_Rk = ids_Rk < context.n_keys
        # What is not listed reads the token's own row: finite, and weighted with exactly 0.
        id_Rk = jnp.where(listed_Rk, ids_Rk, position_R[:, None])
        page_Rk = jnp.take_along_axis(pages_Rp, id_Rk // size, axis=1, mode="clip")
        keys_RkC = latent.at[layer, page_Rk, id_Rk % size].get(mode="clip")
        return attend_gathered(context.ops, query_RNC, keys_RkC, listed_Rk, **sizes)

    position_T = context.batch.positions_T
    return context.rows(
        region, query_TNC, selection, context.pages_Tp, position_T, exponential=True
    )


def _up_to(position_R: Array, valid_R: Array, n_keys: int) -> Array:
    key_1S = jnp.arange(n_keys, dtype=jnp.int32)[None, :]
    return (key_1S <= position_R[:, None]) & valid_R[:, None]


def _grouped(x_TX: Array, context: Context) -> Array:
    batch = context.batch
    return x_TX.reshape(batch.n_groups, batch.rows, *x_TX.shape[1:])


def _native_keys(context: Context, store: Array, layer: int | Array) -> Array:
    if context.pages_Tp is None:
        return _grouped(store, context)
    return slot_keys(store, layer, context.pages_Tp[:: context.batch.rows])


def _select_native(cfg, context, query, index_keys, layer):
    causal_GRS = context.causal_GRS
    score_GRS = index_scores(
        _grouped(query.query_RIJ, context),
        _grouped(query.weight_RI, context),
        _native_keys(context, index_keys, layer),
        causal_GRS,
    )
    n_tokens, n_keys = context.batch.n_tokens, causal_GRS.shape[-1]
    mask_TS = select_mask(score_GRS.reshape(n_tokens, n_keys), cfg.index_topk)
    mask_GRS = mask_TS.reshape(causal_GRS.shape) & causal_GRS
    if not context.gathered:
        return mask_GRS, score_GRS
    k = min(cfg.index_topk, n_keys)
    return mask_to_ids(mask_GRS.reshape(n_tokens, n_keys), k), score_GRS


def _mix_native(context, query_TNC, latent, layer, selection, sizes):
    keys_GSC = _native_keys(context, latent, layer)
    if not context.gathered:
        mixed_GRNK = attend_masked(_grouped(query_TNC, context), keys_GSC, selection, **sizes)
        return mixed_GRNK.reshape(query_TNC.shape[0], *mixed_GRNK.shape[2:])
    keys_GRkC = gather_keys(keys_GSC, _grouped(selection, context))
    keys_TkC = keys_GRkC.reshape(-1, *keys_GRkC.shape[2:])
    return attend_gathered(context.ops, query_TNC, keys_TkC, selection < context.n_keys, **sizes)
