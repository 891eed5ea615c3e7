"""The arrays of a reference file: their names, shapes, and what each of them checks."""

from typing import Literal, get_args

from glm_jax.config import GlmConfig

Part = Literal["prefill", "mtp", "decode", "gradients"]
"""What is run: the whole prompt; the draft layer on it; token by token; the backward."""

PARTS: tuple[Part, ...] = get_args(Part)

Shape = tuple[int, ...]


def part_of(name: str) -> Part:
    """The part that computes an array."""
    if name == "loss" or name.startswith(("grad.", "gradnorm.")):
        return "gradients"
    if name.startswith("mtp."):
        return "mtp"
    return "decode" if name == "logits_decode" else "prefill"


def expected_shapes(cfg: GlmConfig, n_sequences: int, n_tokens: int) -> dict[str, Shape]:
    """Every array a checkpoint can be compared with but `gradnorm.*`, in the order of computing.

    Args:
        cfg: the checkpoint's config.
        n_sequences: sequences in the reference (B).
        n_tokens: tokens of each (S). The draft layer sees S - 1: its last needs a next token.
    """
    bs, bs_mtp = (n_sequences, n_tokens), (n_sequences, n_tokens - 1)
    d, v = cfg.hidden_size, cfg.vocab_size
    kv_b = cfg.num_attention_heads * (cfg.qk_nope_head_dim + cfg.v_head_dim), cfg.kv_lora_rank
    shapes: dict[str, Shape] = {"embed": (*bs, d)}
    for layer, kind in enumerate(cfg.layer_kinds):
        shapes |= _layer_shapes(cfg, f"layer{layer}", kind, bs)
    shapes |= {"final_norm": (*bs, d), "logits": (*bs, v)}
    if cfg.num_nextn_predict_layers:
        shapes |= _layer_shapes(cfg, "mtp", ("sparse", "full"), bs_mtp)
        shapes |= {"mtp.hidden": (*bs_mtp, d), "mtp.logits": (*bs_mtp, v)}
    shapes |= {"logits_decode": (*bs, v), "loss": ()}
    return shapes | {"grad.embed": (v, d), "grad.kv_b_proj0": kv_b}


def _layer_shapes(
    cfg: GlmConfig, layer: str, kind: tuple[str, str], bs: tuple[int, int]
) -> dict[str, Shape]:
    d, chosen = cfg.hidden_size, cfg.num_experts_per_tok
    widths = {"attn_in": d, "q_latent": cfg.q_lora_rank, "kv_latent": cfg.kv_lora_rank}
    if kind[1] == "full":
        widths |= {"idx_scores": bs[1]}
    widths |= {"selected": bs[1], "attn_out": d}
    if kind[0] == "sparse":
        widths |= {"router_logits": cfg.n_routed_experts}
        widths |= {"router_experts": chosen, "router_weights": chosen}
    widths |= {"mlp_out": d, "out": d}
    shapes: dict[str, Shape] = {f"{layer}.{name}": (*bs, width) for name, width in widths.items()}
    return shapes | ({f"{layer}.idx_gap": bs} if kind[1] == "full" else {})


def dtype_kinds(name: str) -> str:
    """NumPy's kinds of dtype that an array may have."""
    if name.endswith(".selected"):
        return "b"
    return "iu" if name == "input_ids" or name.endswith(".router_experts") else "f"


def collapse(names: set[str], everything: set[str]) -> tuple[str, ...]:
    """Names in order, a family that is there as a whole (`mtp.*`, `layer3.*`) as one entry."""
    families: dict[str, set[str]] = {}
    for name in everything:
        families.setdefault(name.partition(".")[0], set()).add(name)
    out = set()
    for name in names:
        family = name.partition(".")[0]
        whole = "." in name and families[family] <= names
        out.add(f"{family}.*" if whole else name)
    return tuple(sorted(out))
