"""Reading the keys: index scores, selection, and mixing of the selected latents.

Pinned arithmetic treats every token by itself: its products have shapes that follow from the config
alone, so that a token's bits do not depend on who else is in the batch. Native arithmetic works on
runs of tokens that share a slot.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm_jax.cache import slot_keys
from glm_jax.config import GlmConfig
from glm_jax.model.attention import attend_gathered, attend_masked, gather_keys
from glm_jax.model.context import Context
from glm_jax.model.indexer import IndexQuery, index_scores, weigh_heads
from glm_jax.numerics.arithmetic import batched_dot
from pallas_kernels.top_k_select import mask_to_ids, select_mask

SHARED_ROWS = 64
"""Neighbouring rows that may share one product with a page of index keys."""


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


def paged_scores(
    query_RIJ: Float[Array, "R I J"],
    weight_RI: Float[Array, "R I"],
    index_MPsJ: Float[Array, "M P s J"],
    layer: int | Array,
    pages_Rp: Int[Array, "R p"],
    position_R: Int[Array, "R"],
) -> Float[Array, "R S"]:
    """Index scores of each row's keys, a page at a time; -inf after its own position.

    The loop ends with the page of the last position among the rows; which pages are visited beyond
    a row's own does not change its scores.
    """
    n_rows, size = query_RIJ.shape[0], index_MPsJ.shape[2]
    width = query_RIJ.shape[2]
    # Never past the table, whatever a padding row's position is.
    n_pages = jnp.minimum(jnp.max(position_R) // size + 1, pages_Rp.shape[1])
    offset_1s = jnp.arange(size, dtype=jnp.int32)[None, :]

    def body(j, score_RS):
        page_R = lax.dynamic_index_in_dim(pages_Rp, j, 1, keepdims=False)
        dot_RIs = _page_products(query_RIJ, index_MPsJ, layer, page_R)
        part_Rs = weigh_heads(dot_RIs, weight_RI, width)
        causal_Rs = j * size + offset_1s <= position_R[:, None]
        part_Rs = jnp.where(causal_Rs, part_Rs, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(score_RS, part_Rs, j * size, 1)

    none_RS = jnp.full((n_rows, pages_Rp.shape[1] * size), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, n_pages, body, none_RS)


def _page_products(query_RIJ, index_MPsJ, layer, page_R) -> Float[Array, "R I s"]:
    """Products of each row's index queries with the keys of its page.

    Where neighbouring rows read the same page (a prompt, a training sequence) they share one
    product; the bits are those of a row's own product `[I, J] x [J, page]`.
    """
    n_rows, n_heads, width = query_RIJ.shape
    run = math.gcd(n_rows, SHARED_ROWS)
    page_gr = page_R.reshape(-1, run)

    def keys(page):
        return index_MPsJ.at[layer, page].get(mode="clip")

    def shared(query_RIJ):
        query_gMJ = query_RIJ.reshape(-1, run * n_heads, width)
        dot = batched_dot("gmj,gsj->gms", query_gMJ, keys(page_gr[:, 0]))
        return dot.reshape(n_rows, n_heads, -1)

    def own(query_RIJ):
        return batched_dot("rij,rsj->ris", query_RIJ, keys(page_R))

    return lax.cond(jnp.all(page_gr == page_gr[:, :1]), shared, own, query_RIJ)


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
