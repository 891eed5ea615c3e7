"""One decoder layer: attention over selected keys, then feed-forward, each on the normed stream."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache, write_rows
from glm_jax.config import GlmConfig
from glm_jax.model.attention import Attention, attend_gathered, attend_masked, gather_keys
from glm_jax.model.indexer import Indexer, index_scores, select
from glm_jax.model.layout import LayerKind
from glm_jax.model.moe import Mlp, Moe
from glm_jax.numerics.primitives import add_rms_norm
from glm_jax.params import ONES, declare
from pallas_kernels.top_k_select import mask_to_ids

Taps = dict[str, Array]
"""Named intermediate values of one layer, for comparison with a reference."""


class Stream(NamedTuple):
    """What flows from layer to layer."""

    residual_TD: Float[Array, "T D"]
    branch_TD: Float[Array, "T D"]
    """Output of the last branch, not yet added."""
    selection: Array
    """Last full layer's selection: mask `[G, R, S]`, or ascending ids `[G, R, k]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer of one forward shares."""

    batch: TokenBatch
    angles: tuple[Array, Array]
    """cos and sin of the main and indexer rotation, `[T, rope/2]`."""
    causal_GRS: Array
    gathered: bool = dataclasses.field(metadata={"static": True})
    """Attend a gathered list of keys (long contexts) or all keys under a mask (short ONES)."""
    taps: bool = dataclasses.field(metadata={"static": True})
    """Also return intermediate values."""


class Place(NamedTuple):
    """Where a layer's rows are in the cache."""

    latent: Any
    index: Any


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
            cache: keys of the past; None attends within the batch only.
            context: batch, rotation and masks of this forward.
            place: this layer's numbers in the cache.
        """
        taps: Taps = {}
        eps = self.cfg.rms_norm_eps
        x_TD, residual_TD = add_rms_norm(
            stream.residual_TD, stream.branch_TD, self.input_norm[...], eps
        )
        mixed_TD, selection, cache = self._attend(
            x_TD, stream.selection, cache, context, place, taps
        )
        y_TD, residual_TD = add_rms_norm(residual_TD, mixed_TD, self.post_norm[...], eps)
        if isinstance(self.feed_forward, Moe):
            out_TD, routes = self.feed_forward(y_TD)
            taps["router_logits"], taps["router_experts"], taps["router_weights"] = routes
        else:
            out_TD = self.feed_forward(y_TD)
        taps |= {"attn_in": x_TD, "attn_out": mixed_TD, "mlp_out": out_TD}
        taps["out"] = residual_TD + out_TD
        return Stream(residual_TD, out_TD, selection), cache, taps if context.taps else {}

    def _attend(self, x_TD, selection, cache, context, place, taps):
        cfg, batch = self.cfg, context.batch
        projected = self.attention.project(x_TD, context.angles)
        taps["q_latent"] = projected.query_latent_RQ
        taps["kv_latent"] = projected.latent_RC[:, : cfg.kv_lora_rank]
        keys_GSC, cache = self._keys(cache, "latent_LUSC", place.latent, batch, projected.latent_RC)
        if self.indexer is not None:
            query = self.indexer.project(x_TD, projected.query_latent_RQ, context.angles)
            index_GSJ, cache = self._keys(cache, "index_LUSJ", place.index, batch, query.key_RJ)
            selection, taps["idx_scores"] = self._select(query, index_GSJ, context)
        taps["selected"] = selection
        query_GRNC = _grouped(projected.query_RNC, batch)
        sizes = {"scale": cfg.softmax_scale, "rank": cfg.kv_lora_rank}
        if context.gathered:
            keys_TkC = gather_keys(keys_GSC, selection).reshape(batch.n_tokens, -1, cfg.cache_width)
            listed_Tk = (selection < keys_GSC.shape[1]).reshape(batch.n_tokens, -1)
            mixed_TNK = attend_gathered(projected.query_RNC, keys_TkC, listed_Tk, **sizes)
        else:
            mixed_GRNK = attend_masked(query_GRNC, keys_GSC, selection, **sizes)
            mixed_TNK = mixed_GRNK.reshape(batch.n_tokens, *mixed_GRNK.shape[2:])
        return self.attention.output(mixed_TNK), selection, cache

    def _select(self, query, index_GSJ, context):
        batch, k = context.batch, self.cfg.index_topk
        score_GRS = index_scores(
            _grouped(query.query_RIJ, batch),
            _grouped(query.weight_RI, batch),
            index_GSJ,
            context.causal_GRS,
        )
        mask_GRS = select(score_GRS, context.causal_GRS, k)
        if not context.gathered:
            return mask_GRS, score_GRS
        n_keys = mask_GRS.shape[-1]
        ids_Tk = mask_to_ids(mask_GRS.reshape(batch.n_tokens, n_keys), min(k, n_keys))
        return _grouped(ids_Tk, batch), score_GRS

    @staticmethod
    def _keys(cache, name, layer, batch, rows_TX):
        """This layer's keys of every group, after storing the batch's own rows."""
        if cache is None:
            return _grouped(rows_TX, batch), None
        store = write_rows(getattr(cache, name), layer, batch, rows_TX)
        return store[layer][batch.slots_G], cache._replace(**{name: store})


def _grouped(x_TX: Array, batch: TokenBatch) -> Array:
    return x_TX.reshape(batch.n_groups, batch.rows, *x_TX.shape[1:])


def first_stream(embedded_TD: Array, context: Context, n_keys: int, k: int) -> Stream:
    """The stream before the first layer; the selection is overwritten by it, as it is full."""
    groups = context.causal_GRS.shape[:2]
    if context.gathered:
        selection = jnp.zeros((*groups, min(k, n_keys)), jnp.int32)
    else:
        selection = jnp.zeros((*groups, n_keys), bool)
    return Stream(embedded_TD, jnp.zeros_like(embedded_TD), selection)
