"""The printed form of `glm-jax info`: at most 100 columns, exact counts, decimal units."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from glm_jax.config import GlmConfig
from glm_jax.model.layout import LayerKind, SegmentLayout, segments
from glm_jax.sizes import Sizes, Tensor

WIDTH = 100
_NAME, _SHAPE, _DTYPE, _AXES, _BYTES = 24, 19, 5, 41, 10
"""Columns of a line of the full tree; the name's include the guides."""
_MODULE = 52
"""Columns of the name in the tree of modules."""
_GUIDE = 4
"""Columns of a guide, per level."""
_SHORT = {"bfloat16": "bf16", "float32": "f32"}
_ORDER = ("embed", "segments", "final_norm", "lm_head", "mtp")

type Group = tuple[str, str, list[Tensor]]


def print_info(sizes: Sizes, figures: dict[str, Any], tree: bool) -> None:
    """Prints the figures of `describe`; `tree` lists every parameter instead of every module."""
    # A pipe has no width: rich would then fold the lines at 80 columns.
    console = Console(width=max(Console().width, WIDTH), highlight=False)
    for title, body in (
        (_headline(sizes.cfg, figures["model"]), _config(sizes.cfg)),
        (_tree_title(tree), _tensor_tree(sizes) if tree else _module_tree(sizes)),
        ("Parameters", _parameters(sizes)),
        ("Weights in memory", _weights(figures["weight_bytes"])),
        ("Cache of the main model", _cache(figures["cache"])),
        (_flops_title(figures["flops"]), _flops(figures["flops"])),
    ):
        console.print(Text(title, style="bold"))
        with console.capture() as shown:
            console.print(body)
        # Tables fill their last column with blanks, which would be copied along.
        print("\n".join(line.rstrip() for line in shown.get().splitlines()), end="\n\n")


def _tree_title(tree: bool) -> str:
    return (
        "Parameter tree" if tree else "Parameter tree (--tree lists shapes, dtypes, logical axes)"
    )


def scaled(n: int, unit: str) -> str:
    """`n` with three to five digits and a decimal prefix: 95232 -> '95.23 kB'."""
    value, prefixes = float(n), iter(("", "k", "M", "G", "T", "P", "E"))
    prefix = next(prefixes)
    while value >= 999.995 and prefix != "E":
        value, prefix = value / 1000, next(prefixes)
    return f"{n} {unit}" if not prefix else f"{value:.2f} {prefix}{unit}"


def layer_pattern(layouts: Iterable[SegmentLayout]) -> str:
    """The layers in short: '(dense,full) ×3 · [(sparse,full) · (sparse,shared) ×3] ×18'."""

    def runs(kinds: Iterable[LayerKind]) -> list[str]:
        return [_times(_kind(kind), len(list(run))) for kind, run in groupby(kinds)]

    out = []
    for layout in layouts:
        inner = runs(layout.pattern)
        if len(inner) > 1 and layout.repeats > 1:
            out.append(_times(f"[{' · '.join(inner)}]", layout.repeats))
        else:
            out += [_times(text, layout.repeats) for text in inner]
    return " · ".join(out)


def _kind(kind: LayerKind) -> str:
    return f"({kind[0]},{kind[1]})"  # no space: a line may only break between layers


def _times(text: str, n: int) -> str:
    return text if n == 1 else f"{text} ×{n}"


def _headline(cfg: GlmConfig, model: str) -> str:
    draft = " + 1 MTP layer" if cfg.num_nextn_predict_layers else ""
    return (
        f"{model}: {cfg.num_hidden_layers} layers{draft}, {cfg.dtype}, "
        f"up to {cfg.max_position_embeddings:,} tokens"
    )


def _table(*right: str, left: str = "") -> Table:
    """A borderless table: one column of names, then columns of numbers under these headings."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(left, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _config(cfg: GlmConfig) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    full, shared = (cfg.indexer_types.count(kind) for kind in ("full", "shared"))
    for name, text in (
        ("  layers", layer_pattern(segments(cfg.layer_kinds))),
        (
            "  widths",
            f"model {cfg.hidden_size:,}, dense MLP {cfg.intermediate_size:,}, "
            f"vocabulary {cfg.vocab_size:,}",
        ),
        (
            "  attention",
            f"{cfg.num_attention_heads} heads; query and key {cfg.qk_nope_head_dim} + "
            f"{cfg.qk_rope_head_dim} (rope), value {cfg.v_head_dim}; ranks: query "
            f"{cfg.q_lora_rank:,}, key-value {cfg.kv_lora_rank:,}",
        ),
        (
            "  indexer",
            f"{cfg.index_n_heads} heads of {cfg.index_head_dim}; top {cfg.index_topk:,} keys; "
            f"{full} full layers, {shared} shared",
        ),
        (
            "  experts",
            f"{cfg.num_experts_per_tok} of {cfg.n_routed_experts} and {cfg.n_shared_experts} "
            f"shared, width {cfg.moe_intermediate_size:,}, scale {cfg.routed_scaling_factor:g}",
        ),
        (
            "  constants",
            f"rope theta {cfg.rope_theta:,.0f}; eps: norms {cfg.rms_norm_eps:g}, latent norms "
            f"{cfg.latent_norm_eps:g}, index norm {cfg.index_norm_eps:g}",
        ),
    ):
        table.add_row(name, text)
    return table


def _parameters(sizes: Sizes) -> Table:
    table = _table("per unit", "units", "total", "", left="  part")
    rows = [x for x in sizes.parts if x.units]
    for row in rows:
        if row.name == "MTP layer":
            table.add_row("  main model", "", "", f"{sizes.main:,}", _billions(sizes.main))
        table.add_row(f"  {row.name}", f"{row.per_unit:,}", str(row.units), f"{row.total:,}", "")
    name = "  all stored" if sizes.mtp else "  main model = all stored"
    table.add_row(name, "", "", f"{sizes.stored:,}", _billions(sizes.stored), style="bold")
    table.add_row(
        "  active per token (no embedding)", "", "", f"{sizes.active:,}", _billions(sizes.active)
    )
    table.add_row("  not counted: router bias buffers", "", "", f"{sizes.buffers:,}", "")
    return table


def _billions(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 10**9 else f"{n / 1e6:.2f} million"


def _weights(figures: dict[str, Any]) -> Table:
    table = _table("bytes", "", left="  dtype")
    for dtype, n in sorted(figures["by_dtype"].items()):
        table.add_row(f"  {dtype}", f"{n:,}", scaled(n, "B"))
    table.add_row("  total", f"{figures['total']:,}", scaled(figures["total"], "B"), style="bold")
    return table


def _cache(figures: dict[str, Any]) -> Table:
    model, fp8 = figures["model"], figures["fp8"]
    table = _table(f"{model['dtype']} (here)", "FP8 (other engines)", left="  bytes")

    def row(name: str, key: str) -> None:
        table.add_row(f"  {name}", *(f"{layout[key]:,} B" for layout in (model, fp8)))

    def long_row(tokens: int, key: str) -> None:
        cells = (scaled(layout[key], "B") for layout in (model, fp8))
        table.add_row(f"  {tokens:,} tokens", *cells, style="bold")

    row("per token and layer", "latent_bytes_per_layer")
    row("per token and full layer, in addition", "index_bytes_per_full_layer")
    row("per token", "bytes_per_token")
    if figures["context"] != figures["max_context"]:
        long_row(figures["context"], "bytes_at_context")
    long_row(figures["max_context"], "bytes_at_max_context")
    if model["mtp_bytes_per_token"]:
        row("the MTP layer adds, per token", "mtp_bytes_per_token")
    return table


def _flops_title(figures: dict[str, Any]) -> str:
    return f"FLOPs at a context of {figures['context']:,} tokens, MTP layer left out"


def _flops(figures: dict[str, Any]) -> Table:
    decode, mean, whole = (figures[x] for x in ("decode_token", "prefill_mean_token", "prefill"))
    table = _table(
        "decode, per token", "prefill, mean per token", "prefill, whole", left="  forward"
    )
    for key, name in (
        ("projections", "weights (active, with head)"),
        ("absorption", "absorption (k_up, v_up)"),
        ("attention", "attention over selected keys"),
        ("indexer", "indexer over all keys"),
        ("forward", "total"),
        ("training", "training (3 × forward)"),
    ):
        table.add_row(
            f"  {name}",
            # Nobody trains on a single decode step.
            "" if key == "training" else scaled(decode[key], "FLOP"),
            scaled(mean[key], "FLOP"),
            scaled(whole[key], "FLOP"),
            style="bold" if key == "forward" else "",
        )
    return table


def _place(x: Tensor) -> tuple[int, bool]:
    return _ORDER.index(x.name.split(".")[0]), x.owner == "mtp.block"


def _owners(sizes: Sizes) -> list[Group]:
    """(path, layer kind in short, tensors) of each block and top-level member, in model order."""
    layouts = segments(sizes.cfg.layer_kinds)
    groups: dict[str, list[Tensor]] = {}
    for x in sorted(sizes.tensors, key=_place):
        groups.setdefault(x.owner, []).append(x)
    out = []
    for owner, tensors in groups.items():
        kind = ""
        if owner.startswith("segments"):
            _, segment, _, position = owner.split(".")
            layout = layouts[int(segment)]
            kind = _times(_kind(layout.pattern[int(position)]), layout.repeats)
        elif owner == "mtp.block":
            kind = _kind(("sparse", "full"))
        out.append((owner, kind, tensors))
    return out


def _module_tree(sizes: Sizes) -> Tree:
    """A line per module; neighbouring blocks of one kind share theirs."""
    tree = _root(f"{'':<{_MODULE}}{'tensors':>8}{'parameters':>18}{'bytes':>12}")
    for owners, kind, tensors in _merged(_owners(sizes)):
        name = owners[0] + (f"–{owners[-1].rpartition('.')[2]}" if len(owners) > 1 else "")
        branch = tree.add(_module_line(f"{name}  {kind}", tensors, 1))
        modules: dict[str, list[Tensor]] = {}
        for x in tensors:
            if x.name != x.owner:
                module = x.name.removeprefix(x.owner + ".").split(".")[0]
                modules.setdefault(module, []).append(x)
        for module, mine in modules.items():
            branch.add(_module_line(module, mine, 2))
    return tree


def _merged(groups: list[Group]) -> Iterable[tuple[list[str], str, list[Tensor]]]:
    """Joins neighbouring blocks of a segment that are of one kind."""
    for (_, kind), run in groupby(groups, lambda x: (x[0].rpartition(".")[0] or x[0], x[1])):
        blocks = list(run)
        yield [x[0] for x in blocks], kind, [tensor for x in blocks for tensor in x[2]]


def _module_line(name: str, tensors: list[Tensor], depth: int) -> Text:
    count = sum(x.n_elements for x in tensors if x.trained)
    n_bytes = scaled(sum(x.n_bytes for x in tensors), "B")
    width = _MODULE - _GUIDE * depth
    return Text(f"{name:<{width}}{len(tensors):>8}{count:>18,}{n_bytes:>12}", no_wrap=True)


def _tensor_tree(sizes: Sizes) -> Tree:
    """A line per parameter: shape, dtype, logical axes, bytes."""
    tree = _root(_tensor_columns("", "shape", "dtype", "logical axes", "bytes", 0))
    for owner, kind, tensors in _owners(sizes):
        if tensors[0].name == owner:
            tree.add(_tensor_line(owner, tensors[0], 1))
            continue
        nodes = {owner: tree.add(Text(f"{owner}  {kind}", no_wrap=True))}
        for x in tensors:
            parent, depth = owner, 2
            *modules, leaf = x.name.removeprefix(owner + ".").split(".")
            for module in modules:
                path = f"{parent}.{module}"
                if path not in nodes:
                    nodes[path] = nodes[parent].add(Text(module))
                parent, depth = path, depth + 1
            nodes[parent].add(_tensor_line(leaf, x, depth))
    return tree


def _tensor_line(name: str, x: Tensor, depth: int) -> Text:
    shape, dtype = "×".join(map(str, x.shape)), _SHORT.get(x.dtype, x.dtype)
    cells = (name, shape, dtype, " ".join(x.axes), scaled(x.n_bytes, "B"))
    return Text(_tensor_columns(*cells, depth), no_wrap=True)


def _tensor_columns(name: str, shape: str, dtype: str, axes: str, size: str, depth: int) -> str:
    width = _NAME - _GUIDE * depth
    return f"{name:<{width}}{shape:<{_SHAPE}}{dtype:<{_DTYPE}} {axes:<{_AXES}}{size:>{_BYTES}}"


def _root(heading: str) -> Tree:
    return Tree(Text(heading, style="dim", no_wrap=True), guide_style="dim")
