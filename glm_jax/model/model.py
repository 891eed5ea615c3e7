"""The whole model: embedding, segments of scanned layers, final norm, head, draft layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm_jax.cache import LatentCache
from glm_jax.config import GlmConfig
from glm_jax.model.block import Block, Stream, first_stream
from glm_jax.model.context import Context, Place, Taps
from glm_jax.model.layout import SegmentLayout, segments
from glm_jax.model.mtp import Mtp
from glm_jax.numerics.arithmetic import Arithmetic, native
from glm_jax.numerics.primitives import add_rms_norm
from glm_jax.params import ONES, Normal, declare, materialise


class Segment(nnx.Module):
    """A pattern of layers, repeated; parameters are stacked over the repeats."""

    def __init__(self, cfg: GlmConfig, layout: SegmentLayout):
        self.layout = layout
        self.blocks = nnx.List(
            [Block(cfg, kind, stack=(layout.repeats,)) for kind in layout.pattern]
        )

    def __call__(
        self, stream: Stream, cache: LatentCache | None, context: Context, first_full: int
    ) -> tuple[Stream, LatentCache | None, list[Taps]]:
        """Runs the segment's layers; taps come back one dict a layer, in layer order."""
        layout = self.layout
        # A scan copies what it slices. A forward that reads a few experts leaves them in the stack;
        # one that may be differentiated does not, or every layer's gradient would be a whole stack.
        keep = cache is not None and layout.repeats > 1
        graphdef, whole, stacked = nnx.split(self.blocks, _of_experts if keep else nnx.Nothing, ...)
        n_full = sum(indexer == "full" for _, indexer in layout.pattern)

        def repeat(carry, scanned):
            (stream, cache), (params, step) = carry, scanned
            full, taps = first_full + step * n_full, []
            for i, block in enumerate(nnx.merge(graphdef, whole, params)):
                layer = layout.layer(0, i) + step * len(layout.pattern)
                place = Place(layer, full, step if keep else None)
                stream, cache, layer_taps = block(stream, cache, context, place)
                full = full + int(layout.pattern[i][1] == "full")
                taps.append(layer_taps)
            return (stream, cache), taps

        if layout.repeats == 1:
            (stream, cache), taps = repeat((stream, cache), (_at(stacked, 0), 0))
            return stream, cache, taps
        steps = jnp.arange(layout.repeats, dtype=jnp.int32)
        (stream, cache), taps = jax.lax.scan(repeat, (stream, cache), (stacked, steps))
        return stream, cache, [_at(layer, r) for r in range(layout.repeats) for layer in taps]


def _of_experts(path: Any, variable: Any) -> bool:
    """Whether a parameter is a weight of the routed experts."""
    del path
    return "experts" in variable.logical_axes and "expert_mlp" in variable.logical_axes


def _at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


class GlmModel(nnx.Module):
    """A GLM-5-family model. Pure: `nnx.split` it and merge inside a jitted function, or pass it."""

    def __init__(self, cfg: GlmConfig):
        self.cfg = cfg
        d, v, init = cfg.hidden_size, cfg.vocab_size, Normal(cfg.initializer_range)
        self.embed = declare((v, d), ("vocab", "embed"), init, cfg.dtype)
        self.segments = nnx.List([Segment(cfg, layout) for layout in segments(cfg.layer_kinds)])
        self.final_norm = declare((d,), ("embed",), ONES, cfg.dtype)
        self.lm_head = declare((d, v), ("embed", "vocab"), init, cfg.dtype)
        self.mtp = Mtp(cfg) if cfg.num_nextn_predict_layers else None

    @classmethod
    def abstract(cls, cfg: GlmConfig) -> "GlmModel":
        """The model with shapes in place of arrays: no memory, whatever its size."""
        return cls(cfg)

    @classmethod
    def init(cls, cfg: GlmConfig, seed: int = 0) -> "GlmModel":
        """A randomly initialised model (normal `initializer_range`; norms 1; biases 0)."""
        return materialise(cls(cfg), seed)

    def trunk(
        self, cache: LatentCache | None, context: Context
    ) -> tuple[Float[Array, "T D"], LatentCache | None, dict[str, Taps]]:
        """Embedding to final norm."""
        embedded_TD = self.embed[...][context.batch.ids_T]
        stream = first_stream(self.cfg, embedded_TD, context)
        layers: list[Taps] = []
        for segment in self.segments:
            first = segment.layout.first_layer
            first_full = self.cfg.indexer_types[:first].count("full")
            stream, cache, taps = segment(stream, cache, context, first_full)
            layers += taps
        hidden_TD = context.rows(
            lambda residual_RD, branch_RD: add_rms_norm(
                context.ops, residual_RD, branch_RD, self.final_norm[...], self.cfg.rms_norm_eps
            )[0],
            stream.residual_TD,
            stream.branch_TD,
        )
        if not context.taps:
            return hidden_TD, cache, {}
        named = {f"layer{i}": taps for i, taps in enumerate(layers)}
        named["model"] = {"embed": embedded_TD, "final_norm": hidden_TD}
        return hidden_TD, cache, named

    def logits(
        self, hidden_TD: Float[Array, "T D"], ops: Arithmetic | None = None
    ) -> Float[Array, "T V"]:
        """f32 logits of the next token (or, for the draft layer's output, of the one after)."""
        return (ops or native()).matmul(hidden_TD, self.lm_head[...], out=jnp.float32)
