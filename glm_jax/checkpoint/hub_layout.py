"""The one map between our leaves and the hub's tensors; load, save and gradients all read it.

A hub matrix is `[out, in]` and may flatten several axes into one; ours keep axes apart, put the
input first, and stack layers and experts. Each rule below spells both sides in letters: `"NH Q"` is
a matrix whose rows run over (N, H), `"QNH"` the leaf. Capitals are axes, with their widths in
`_widths`; small letters are places in the leaf at which the tensor goes:

    l  repeat of the layer (stacked leaves)    e  expert    g  0 for gate, 1 for up
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from glm_jax.config import GlmConfig
from glm_jax.model.layout import LayerKind, segments

Region = tuple[tuple[int, int], ...]
"""(start, stop) on each axis."""

# Letters of a leaf that are a part of one letter of the hub tensor: (that letter, where it starts).
_PART_OF = {"P": ("W", ""), "U": ("W", "P")}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a leaf, and the part of a hub tensor that fills it."""

    leaf: str
    """Dotted path of the leaf."""
    box: Region
    """Place in the leaf."""
    view: tuple[int, ...]
    """Shape to which the hub tensor is reshaped: one axis a letter."""
    window: Region
    """Part of the view that goes into the box."""
    order: tuple[int, ...]
    """View axis of each leaf axis."""
    rows: int
    """How many leading axes of the view make up the hub tensor's first axis."""
    places: tuple[int, ...]
    """Leaf axes on which the tensor has one place (layer, expert, gate or up)."""

    def to_view(self, region: Region) -> Region:
        """The part of the view that belongs to a region of the leaf inside the box."""
        out = list(self.window)
        for (start, stop), (origin, _), axis in zip(region, self.box, self.order, strict=True):
            first = self.window[axis][0]
            out[axis] = (first + start - origin, first + stop - origin)
        return tuple(out)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HubTensor:
    """A tensor of a hub checkpoint."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """`weight` (the config's dtype), `router` (f32 here, perhaps bf16 in files) or `bias` (f32)."""
    fp8: bool
    """Whether the FP8 releases quantise it. Loading goes by the presence of a scale instead."""
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rule:
    hub: str
    axes: str
    leaves: tuple[tuple[str, str], ...]
    fp8: bool = False
    kind: str = "weight"
    gate_or_up: int = 0


def _rule(hub: str, axes: str, *leaves: str, **more) -> _Rule:
    pairs = tuple((path, letters) for path, letters in (leaf.split() for leaf in leaves))
    return _Rule(hub=hub, axes=axes, leaves=pairs, **more)


def _mlp(hub: str, leaf: str, width: str, expert: str = "") -> tuple[_Rule, ...]:
    gate_up, down = f"{leaf}gate_up {expert}Dg{width}", f"{leaf}down {expert}{width}D"
    return (
        _rule(f"{hub}gate_proj.weight", f"{width} D", gate_up, fp8=True, gate_or_up=0),
        _rule(f"{hub}up_proj.weight", f"{width} D", gate_up, fp8=True, gate_or_up=1),
        _rule(f"{hub}down_proj.weight", f"D {width}", down, fp8=True),
    )


_BEFORE = (_rule("model.embed_tokens.weight", "T D", "embed TD"),)
_AFTER = (
    _rule("model.norm.weight", "D", "final_norm D"),
    _rule("lm_head.weight", "T D", "lm_head DT"),
)
_BLOCK = (
    _rule("input_layernorm.weight", "D", "input_norm D"),
    _rule("self_attn.q_a_proj.weight", "Q D", "attention.q_a DQ", fp8=True),
    _rule("self_attn.q_a_layernorm.weight", "Q", "attention.q_a_norm Q"),
    _rule("self_attn.q_b_proj.weight", "NH Q", "attention.q_b QNH", fp8=True),
    _rule("self_attn.kv_a_proj_with_mqa.weight", "C D", "attention.kv_a DC", fp8=True),
    _rule("self_attn.kv_a_layernorm.weight", "K", "attention.kv_a_norm K"),
    _rule(
        "self_attn.kv_b_proj.weight", "NW K", "attention.k_up NPK", "attention.v_up NKU", fp8=True
    ),
    _rule("self_attn.o_proj.weight", "D NU", "attention.o NUD", fp8=True),
    _rule("post_attention_layernorm.weight", "D", "post_norm D"),
)
_INDEXER = (
    _rule("self_attn.indexer.wq_b.weight", "IJ Q", "indexer.q_b QIJ", fp8=True),
    _rule("self_attn.indexer.wk.weight", "J D", "indexer.k DJ", fp8=True),
    _rule("self_attn.indexer.k_norm.weight", "J", "indexer.k_norm J"),
    _rule("self_attn.indexer.k_norm.bias", "J", "indexer.k_norm_bias J"),
    _rule("self_attn.indexer.weights_proj.weight", "I D", "indexer.head_weight DI"),
)
_DENSE = _mlp("mlp.", "feed_forward.", "F")
_SPARSE = (
    _rule("mlp.gate.weight", "E D", "feed_forward.router DE", kind="router"),
    _rule("mlp.gate.e_score_correction_bias", "E", "feed_forward.router_bias E", kind="bias"),
    *_mlp("mlp.shared_experts.", "feed_forward.shared.", "S"),
    *_mlp("mlp.experts.{e}.", "feed_forward.", "M", expert="e"),
)
_MTP = (
    _rule("enorm.weight", "D", "embed_norm D"),
    _rule("hnorm.weight", "D", "hidden_norm D"),
    _rule("eh_proj.weight", "O XD", "join XDO"),  # X: the embedding's half, then the hidden's
    _rule("shared_head.norm.weight", "D", "norm D"),
)


def _widths(cfg: GlmConfig) -> dict[str, int]:
    moe = cfg.moe_intermediate_size
    return {
        "T": cfg.vocab_size,
        "D": cfg.hidden_size,
        "O": cfg.hidden_size,
        "Q": cfg.q_lora_rank,
        "K": cfg.kv_lora_rank,
        "C": cfg.cache_width,
        "N": cfg.num_attention_heads,
        "H": cfg.qk_head_dim,
        "P": cfg.qk_nope_head_dim,
        "U": cfg.v_head_dim,
        "W": cfg.qk_nope_head_dim + cfg.v_head_dim,
        "I": cfg.index_n_heads,
        "J": cfg.index_head_dim,
        "F": cfg.intermediate_size,
        "E": cfg.n_routed_experts,
        "M": moe,
        "S": moe * cfg.n_shared_experts,
        "X": 2,
        **dict.fromkeys("leg", 1),
        "": 0,
    }


def hub_tensors(cfg: GlmConfig) -> Iterator[HubTensor]:
    """Every tensor of the BF16 release of a model with this config, in the order of its layers."""
    mapper = _Mapper(_widths(cfg))

    def tensors(rules, hub="", leaf="", repeat=None):
        for rule in rules:
            experts = cfg.n_routed_experts if "{e}" in rule.hub else 1
            for expert in range(experts):
                at = {"l": repeat, "e": expert, "g": rule.gate_or_up}
                yield mapper.tensor(rule, hub + rule.hub.format(e=expert), leaf, at)

    yield from tensors(_BEFORE)
    for number, (kind, leaf, repeat) in enumerate(_layers(cfg)):
        yield from tensors(_rules(kind), f"model.layers.{number}.", leaf, repeat)
    yield from tensors(_AFTER)
    if cfg.num_nextn_predict_layers:
        yield from tensors(_MTP, mtp_prefix(cfg), "mtp.")
        yield from tensors(_rules(("sparse", "full")), mtp_prefix(cfg), "mtp.block.")


def mtp_prefix(cfg: GlmConfig) -> str:
    """What the names of the MTP layer's tensors begin with: it is stored after the last layer."""
    return f"model.layers.{cfg.num_hidden_layers}."


def _layers(cfg: GlmConfig) -> list[tuple[LayerKind, str, int]]:
    """(kind, path of the leaves, repeat in their stack) of each layer in model order."""
    layers = {}
    for i, segment in enumerate(segments(cfg.layer_kinds)):
        for repeat in range(segment.repeats):
            for position, kind in enumerate(segment.pattern):
                place = (kind, f"segments.{i}.blocks.{position}.", repeat)
                layers[segment.layer(repeat, position)] = place
    return [layers[number] for number in sorted(layers)]


def _rules(kind: LayerKind) -> tuple[_Rule, ...]:
    feed_forward, indexer = kind
    return (
        *_BLOCK,
        *(_INDEXER if indexer == "full" else ()),
        *(_SPARSE if feed_forward == "sparse" else _DENSE),
    )


class _Mapper:
    """Turns rules into tensors; what is the same for all layers and experts is worked out once."""

    def __init__(self, widths: dict[str, int]):
        self.widths = widths
        self._known: dict[tuple[str, str], Piece] = {}

    def tensor(self, rule: _Rule, name: str, prefix: str, at: dict[str, int | None]) -> HubTensor:
        """The tensor of a rule, for leaves below `prefix`; `at` is its place on each axis."""
        stacked = "" if at["l"] is None else "l"
        pieces = []
        for path, unstacked in rule.leaves:
            letters = stacked + unstacked
            shape = self._known.get((rule.axes, letters))
            if shape is None:
                shape = self._known[rule.axes, letters] = self._geometry(rule.axes, letters)
            box = list(shape.box)
            for axis in shape.places:
                start = at[letters[axis]] or 0
                box[axis] = (start, start + 1)
            pieces.append(
                Piece(
                    leaf=prefix + path,
                    box=tuple(box),
                    view=shape.view,
                    window=shape.window,
                    order=shape.order,
                    rows=shape.rows,
                    places=shape.places,
                )
            )
        size = tuple(self._size(axis) for axis in rule.axes.split())
        return HubTensor(name=name, shape=size, kind=rule.kind, fp8=rule.fp8, pieces=tuple(pieces))

    def _size(self, letters: str) -> int:
        return math.prod(self.widths[letter] for letter in letters)

    def _geometry(self, axes: str, letters: str) -> Piece:
        """A piece at place 0 of a leaf without a name."""
        widths, places = self.widths, "".join(letter for letter in letters if letter in "leg")
        # A place is an axis of width 1 of the view, which so has the rank of the leaf.
        view = places + axes.replace(" ", "")
        window, order = [(0, widths[letter]) for letter in view], []
        for letter in letters:
            source, offset = (letter, "") if letter in view else _PART_OF[letter]
            window[view.index(source)] = (widths[offset], widths[offset] + widths[letter])
            order.append(view.index(source))
        return Piece(
            leaf="",
            box=tuple((0, widths[letter]) for letter in letters),
            view=tuple(widths[letter] for letter in view),
            window=tuple(window),
            order=tuple(order),
            rows=len(places) + len(axes.split()[0]),
            places=tuple(axis for axis, letter in enumerate(letters) if letter in places),
        )


_EXPERT = re.compile(r"experts\.\d+\.(gate|up|down)_proj\.weight$")


def transformers_name(name: str) -> str:
    """The transformers parameter that holds a hub tensor: it fuses the experts of a layer."""

    def fused(match: re.Match[str]) -> str:
        return "experts.down_proj" if match[1] == "down" else "experts.gate_up_proj"

    return _EXPERT.sub(fused, name)
