"""One decoder layer: attention over selected keys, then feed-forward, each on the normed stream.

The layer is a chain of regions, each a function of rows; between them only moves happen (cache
writes, sorting rows by expert):

    project   norm, queries, latent, index query
    select    index scores and exact selection (full layers)
    mix       selected latents, mixed
    output    output projection, residual add, norm
    route, experts, combine    or    mlp
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm_jax.cache import LatentCache, write_rows
from glm_jax.config import GlmConfig
from glm_jax.model.attention import Attention, Projected
from glm_jax.model.context import Context, Place, Taps
from glm_jax.model.indexer import Indexer, IndexQuery
from glm_jax.model.layout import LayerKind
from glm_jax.model.moe import Mlp, Moe, Routes
from glm_jax.model.select import mix, select_keys
from glm_jax.numerics.primitives import add_rms_norm
from glm_jax.params import ONES, declare


class Stream(NamedTuple):
    """What flows from layer to layer."""

    residual_TD: Float[Array, "T D"]
    branch_TD: Float[Array, "T D"]
    """Output of the last branch, not yet added."""
    selection: Array
    """Last full layer's selection: ascending ids `[T, k]`, padded with the number of keys; or, in
    masked attention, a mask `[G, R, S]`."""


class Block(nnx.Module):
    """Parameters of one (stack of) decoder layers."""

    def __init__(self, cfg: GlmConfig, kind: LayerKind, *, stack: tuple[int, ...] = ()):
        self.cfg = cfg
        feed_forward, indexer = kind

        def gain():
            return declare((cfg.hidden_size,), ("embed",), ONES, cfg.dtype, stack=stack)

        self.input_norm = gain()
        self.attention = Attention(cfg, stack=stack)
        self.indexer = Indexer(cfg, stack=stack) if indexer == "full" else None
        self.post_norm = gain()
        if feed_forward == "sparse":
            self.feed_forward = Moe(cfg, stack=stack)
        else:
            self.feed_forward = Mlp(cfg, cfg.intermediate_size, stack=stack)

    def __call__(
        self, stream: Stream, cache: LatentCache | None, context: Context, place: Place
    ) -> tuple[Stream, LatentCache | None, Taps]:
        """Runs the layer.

        Args:
            stream: residual, pending branch and selection.
            cache: keys of the past; None attends within the batch only (native arithmetic).
            context: batch, rotation and arithmetic of this forward.
            place: this layer's numbers in the cache.
        """
        x_TD, residual_TD, projected, query = self._project(stream, context)
        latent, selection, scores = projected.latent_RC, stream.selection, None
        if cache is not None:
            cache = _store(cache, context, place, projected, query)
            latent = cache.latent_LPsC
        if query is not None:
            keys = query.key_RJ if cache is None else cache.index_MPsJ
            selection, scores = select_keys(self.cfg, context, query, keys, place.index)
        mixed_TNK = mix(self.cfg, context, projected.query_RNC, latent, place.latent, selection)
        y_TD, residual_TD, attended_TD = self._output(mixed_TNK, residual_TD, context)
        out_TD, routes = self._feed_forward(y_TD, context, place)
        new = Stream(residual_TD, out_TD, selection)
        if not context.taps:
            return new, cache, {}
        taps = {
            "attn_in": x_TD,
            "query": projected.query_RNC,
            "latent": projected.latent_RC,
            "q_latent": projected.query_latent_RQ,
            "kv_latent": projected.latent_RC[:, : self.cfg.kv_lora_rank],
            "selected": selection,
            "mixed": mixed_TNK,
            "attn_out": attended_TD,
            "residual": residual_TD,
            "mlp_in": y_TD,
            "mlp_out": out_TD,
            "out": residual_TD + out_TD,
        }
        if scores is not None:
            taps["idx_scores"] = scores
        if routes is not None:
            taps["router_logits"], taps["router_experts"], taps["router_weights"] = routes
        return new, cache, taps

    def _project(
        self, stream: Stream, context: Context
    ) -> tuple[Array, Array, Projected, IndexQuery | None]:
        def region(residual_RD, branch_RD, angles):
            x_RD, residual_RD = add_rms_norm(
                context.ops, residual_RD, branch_RD, self.input_norm[...], self.cfg.rms_norm_eps
            )
            projected = self.attention.project(context.ops, x_RD, angles)
            query = None
            if self.indexer is not None:
                query = self.indexer.project(context.ops, x_RD, projected.query_latent_RQ, angles)
            return x_RD, residual_RD, projected, query

        return context.rows(region, stream.residual_TD, stream.branch_TD, context.angles)

    def _output(self, mixed_TNK: Array, residual_TD: Array, context: Context):
        def region(mixed_RNK, residual_RD):
            attended_RD = self.attention.output(context.ops, mixed_RNK)
            y_RD, residual_RD = add_rms_norm(
                context.ops, residual_RD, attended_RD, self.post_norm[...], self.cfg.rms_norm_eps
            )
            return y_RD, residual_RD, attended_RD

        return context.rows(region, mixed_TNK, residual_TD)

    def _feed_forward(
        self, y_TD: Array, context: Context, place: Place
    ) -> tuple[Array, Routes | None]:
        ops, layer = context.ops, self.feed_forward
        if isinstance(layer, Mlp):
            return context.rows(lambda y_RD: layer(ops, y_RD), y_TD, exponential=True), None
        routes = context.rows(lambda y_RD: layer.route(ops, y_RD), y_TD, exponential=True)
        valid_T = context.batch.valid_T
        expert_TkD = layer.experts(ops, y_TD, routes.ids_Rk, valid_T, place.in_stack)
        out_TD = context.rows(
            lambda y_RD, expert_RkD, gates_Rk: layer.combine(ops, y_RD, expert_RkD, gates_Rk),
            y_TD,
            expert_TkD,
            routes.gates_Rk,
            exponential=True,
        )
        return out_TD, routes


def _store(
    cache: LatentCache,
    context: Context,
    place: Place,
    projected: Projected,
    query: IndexQuery | None,
) -> LatentCache:
    """Writes the tokens' own rows into their pages."""
    rows_T = context.rows_T
    assert rows_T is not None, "a context made for a cache has rows"
    latent = write_rows(cache.latent_LPsC, place.latent, rows_T, projected.latent_RC)
    cache = cache.replace(latent_LPsC=latent)
    if query is None:
        return cache
    return cache.replace(index_MPsJ=write_rows(cache.index_MPsJ, place.index, rows_T, query.key_RJ))


def first_stream(cfg: GlmConfig, embedded_TD: Array, context: Context) -> Stream:
    """The stream before the first layer; the selection is overwritten by it, as it is full."""
    n_keys = context.n_keys
    if context.causal_GRS is None:
        selection = jnp.zeros((embedded_TD.shape[0], cfg.index_topk), jnp.int32)
    elif context.gathered:
        selection = jnp.zeros((embedded_TD.shape[0], min(cfg.index_topk, n_keys)), jnp.int32)
    else:
        selection = jnp.zeros(context.causal_GRS.shape, bool)
    return Stream(embedded_TD, jnp.zeros_like(embedded_TD), selection)
