"""The names of a GLM-5 config's fields, grouped by what they may hold, and the text of errors."""

import difflib
from collections.abc import Iterable
from typing import Literal, TypeGuard

# One problem per field, in the order found: field -> "field = value: reason; remedy".
type Problems = dict[str, str]

type MlpType = Literal["dense", "sparse"]
type IndexerType = Literal["full", "shared"]

MODEL_TYPE = "glm_moe_dsa"
DTYPES = ("bfloat16", "float32")
INDEXER_TYPES = ("full", "shared")
MLP_TYPES = ("dense", "sparse")

# Whole numbers of at least 1. A config without one is refused: any default would be a guess.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "max_position_embeddings",
)

LARGEST_SIZE = 2**31 - 1
"""Sizes and ids are 32-bit integers in every program."""

# Finite numbers above 0.
FLOATS = (
    "routed_scaling_factor",
    "rope_theta",
    "rms_norm_eps",
    "latent_norm_eps",
    "index_norm_eps",
    "initializer_range",
)

# Whole numbers that may be absent, with the least value allowed.
OPTIONAL_INTS = {
    "head_dim": 0,
    "pad_token_id": 0,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 0,
}

# Keys of config.json for which this family has one value only. Absent or null means that value.
FIXED: dict[str, object] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def describe(field: str, value: object, reason: str, remedy: str) -> str:
    """One line of an error: the field, the value (shortened), why it is refused, what to do."""
    shown = repr(list(value) if isinstance(value, tuple) else value)  # as config.json writes it
    if len(shown) > 120:
        shown = f"{shown[:90]} ... {shown[-20:]}"
    return f"{field} = {shown}: {reason}; {remedy}"


SHOWN = 20
"""Offending fields listed before "and N more"."""


def report(source: str, problems: Problems) -> str:
    """The text of an error that lists the offending fields."""
    if len(problems) == 1:
        return f"{source}: {next(iter(problems.values()))}"
    lines = "".join(f"\n  - {text}" for text in list(problems.values())[:SHOWN])
    if len(problems) > SHOWN:
        lines += f"\n  ... and {len(problems) - SHOWN} more"
    return f"{source}: {len(problems)} fields cannot be used:{lines}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """'did you mean ...? ' for a misspelt name, or an empty text when nothing is close."""
    close = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}? " if close else ""


def same(value: object, wanted: object) -> bool:
    """Equality that does not take True for 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


def dense_first(count: int, layers: int) -> tuple[MlpType, ...]:
    """`mlp_layer_types` of a model whose first `count` layers are dense."""
    return ("dense",) * count + ("sparse",) * (layers - count)


def is_int(value: object) -> TypeGuard[int]:
    """Whether this is a whole number; True and 64.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether this is a number; True and "64" are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
