"""What a model weighs and costs: parameters, bytes, cache and FLOPs, without making an array.

Every figure is an exact whole number. Parameters are counted on the abstract tree, so they are
those of the model that runs.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.model.layout import SegmentLayout, segments
from glm_jax.params import Buffer, leaves, size

PARTS = (
    "embedding, lm_head",
    "MLA",
    "layer norms",
    "dense MLP",
    "MoE",
    "final norm",
    "indexer",
    "MTP layer",
)
"""Rows of the parameter table. All but the last make up the main model."""

_TOP = {
    "embed": "embedding, lm_head",
    "lm_head": "embedding, lm_head",
    "final_norm": "final norm",
    "mtp": "MTP layer",
}
_IN_LAYER = {
    "attention": "MLA",
    "indexer": "indexer",
    "input_norm": "layer norms",
    "post_norm": "layer norms",
}
_FEED_FORWARD = {"dense": "dense MLP", "sparse": "MoE"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One stored array, as the model declares it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    """Logical name of each axis."""
    trained: bool
    """False for a buffer (the router's selection bias), which no parameter count includes."""
    part: str
    """Row of `PARTS`."""
    n_elements: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole array."""
        return self.n_elements * jnp.dtype(self.dtype).itemsize

    @property
    def n_layers(self) -> int:
        """Layers that are stacked in it; 1 where none are."""
        return self.shape[0] if self.axes[0] == "layers" else 1

    @property
    def owner(self) -> str:
        """Path of the block (or, outside of blocks, of the top-level member) it belongs to."""
        path = self.name.split(".")
        if path[0] == "segments":
            return ".".join(path[:4])
        return ".".join(path[:2]) if path[:2] == ["mtp", "block"] else path[0]


class Part(NamedTuple):
    """One row of the parameter table."""

    name: str
    per_unit: int
    units: int
    total: int


class CacheLayout(NamedTuple):
    """Cached bytes of one token."""

    latent: int
    """In each layer."""
    index_key: int
    """In each full layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Forward FLOPs by what they are spent on; a multiply-add counts as two."""

    projections: int
    """Products with weights, the head's included, absorption left out."""
    absorption: int
    """Products that carry queries into and outputs out of the latent space."""
    attention: int
    """Scores of, and mixing of, the selected keys."""
    indexer: int
    """Index scores of every key, in the full layers."""

    @property
    def forward(self) -> int:
        """One forward."""
        return self.projections + self.absorption + self.attention + self.indexer

    @property
    def training(self) -> int:
        """Forward and backward, as 3 x forward: the usual convention, without rematerialisation.

        A bound from above: a frozen indexer has no backward.
        """
        return 3 * self.forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The figures of one model."""

    cfg: GlmConfig
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, cfg: GlmConfig) -> "Sizes":
        """Reads the abstract tree of `cfg`; no array is made."""
        layouts = segments(cfg.layer_kinds)
        return cls(
            cfg=cfg,
            tensors=tuple(
                Tensor(
                    name=name,
                    shape=tuple(variable.shape),
                    dtype=jnp.dtype(variable.dtype).name,
                    axes=variable.get_metadata("logical_axes"),
                    trained=not isinstance(variable, Buffer),
                    part=_part(name.split("."), layouts),
                    n_elements=size(variable),
                )
                for name, variable in leaves(GlmModel.abstract(cfg))
            ),
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The rows of `PARTS`, zeros for what the model does not have, buffers left out."""
        rows = []
        for name in PARTS:
            mine = [x for x in self.tensors if x.part == name and x.trained]
            units = sum(
                {"mtp" if name == "MTP layer" else x.owner: x.n_layers for x in mine}.values()
            )
            total = sum(x.n_elements for x in mine)
            per_unit, rest = divmod(total, max(units, 1))
            if rest:
                raise AssertionError(f"{name}: {total} parameters are not {units} equal units")
            rows.append(Part(name, per_unit, units, total))
        return tuple(rows)

    @property
    def stored(self) -> int:
        """Parameters of the model and its MTP layer."""
        return sum(x.n_elements for x in self.tensors if x.trained)

    @property
    def mtp(self) -> int:
        """Parameters of the MTP layer; it uses the model's embedding and head."""
        return sum(x.n_elements for x in self.tensors if x.trained and x.part == "MTP layer")

    @property
    def main(self) -> int:
        """Parameters of the model without its MTP layer."""
        return self.stored - self.mtp

    @property
    def buffers(self) -> int:
        """Elements of the router biases, the MTP layer's included."""
        return sum(x.n_elements for x in self.tensors if not x.trained)

    @property
    def active(self) -> int:
        """Main-model parameters one token uses: chosen experts only, no embedding, with head."""
        return sum(self._active(x) for x in self.tensors)

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of all parameters and buffers."""
        out: dict[str, int] = {}
        for x in self.tensors:
            out[x.dtype] = out.get(x.dtype, 0) + x.n_bytes
        return out

    def work(self, n_cached: int, n_tokens: int) -> Work:
        """Forward FLOPs of `n_tokens` of one sequence after `n_cached` earlier ones.

        A decode step at context T is `work(T - 1, 1)`; reading a prompt of T tokens is
        `work(0, T)`. Token t (from 1) attends min(t, k) keys and its indexer scores t:

            projections + absorption   2 x (active parameters in matrices)
            absorption                 2 N K (nope + v)          per layer
            attention                  2 N (C + K) min(t, k)     per layer
            indexer                    2 I J t                   per full layer

        in the model's own terms (glm_jax/model/attention.py, indexer.py): each line is two FLOPs
        for every multiply-add of its einsums. Norms, softmax, rotation and the indexer's ReLU and
        head sum are not counted (the last is 1 / J of its line). The MTP layer is left out and
        every token gets logits. It is the work the model asks for: an implementation that
        attends all keys under a mask does more.

        Raises:
            GlmError: the last token is beyond `max_position_embeddings`, or a count is negative.
        """
        cfg, last = self.cfg, n_cached + n_tokens
        if n_cached < 0 or n_tokens < 1 or last > cfg.max_position_embeddings:
            raise GlmError(
                f"context = {last}: must be 1 to max_position_embeddings = "
                f"{cfg.max_position_embeddings}; give a length in that range"
            )
        heads, rank, layers = cfg.num_attention_heads, cfg.kv_lora_rank, cfg.num_hidden_layers
        widths = cfg.qk_nope_head_dim + cfg.v_head_dim
        absorption = 2 * layers * heads * rank * widths
        matrices = sum(self._active(x) for x in self.tensors if len(set(x.axes) - {"layers"}) > 1)
        attended = _sum_of_min(last, cfg.index_topk) - _sum_of_min(n_cached, cfg.index_topk)
        scored = _sum_of_min(last, last) - _sum_of_min(n_cached, last)
        n_full = cfg.indexer_types.count("full")
        return Work(
            projections=n_tokens * (2 * matrices - absorption),
            absorption=n_tokens * absorption,
            attention=2 * layers * heads * (cfg.cache_width + rank) * attended,
            indexer=2 * n_full * cfg.index_n_heads * cfg.index_head_dim * scored,
        )

    def _active(self, x: Tensor) -> int:
        if x.part == "MTP layer" or x.name == "embed" or not x.trained:
            return 0
        if "expert_mlp" in x.axes:  # routed experts; the shared one's axis is `mlp`
            return x.n_elements // self.cfg.n_routed_experts * self.cfg.num_experts_per_tok
        return x.n_elements


def _part(path: list[str], layouts: tuple[SegmentLayout, ...]) -> str:
    if path[0] != "segments":
        return _TOP[path[0]]
    _, segment, _, position, member, *_ = path
    if member == "feed_forward":
        return _FEED_FORWARD[layouts[int(segment)].pattern[int(position)][0]]
    return _IN_LAYER[member]


def _sum_of_min(n: int, bound: int) -> int:
    """Sum of min(t, bound) over t = 1 to n."""
    low = min(n, bound)
    return low * (low + 1) // 2 + (n - low) * bound


def cache_layout(cfg: GlmConfig) -> CacheLayout:
    """The layout of `LatentCache`: C latent and J index values in the model's dtype."""
    width = jnp.dtype(cfg.dtype).itemsize
    return CacheLayout(cfg.cache_width * width, cfg.index_head_dim * width)


def fp8_cache_layout(cfg: GlmConfig) -> CacheLayout:
    """The FP8 layout of serving engines, for comparison; this project does not store it.

    e4m3 values with one fp32 scale for every (begun) 128 of them; rope values stay bf16.
    """

    def quantised(n: int) -> int:
        return n + 4 * -(-n // 128)

    return CacheLayout(
        quantised(cfg.kv_lora_rank) + 2 * cfg.qk_rope_head_dim, quantised(cfg.index_head_dim)
    )


def cache_bytes(cfg: GlmConfig, layout: CacheLayout) -> int:
    """Cached bytes a token in the main model. The MTP layer, a full one, adds `sum(layout)`."""
    return (
        cfg.num_hidden_layers * layout.latent + cfg.indexer_types.count("full") * layout.index_key
    )
