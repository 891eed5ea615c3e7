"""From the keys of a config.json to the fields of `GlmConfig`, and back.

The rules are those of the published configs: `indexer_types` wins over `index_topk_pattern`, which
wins over the frequency rule; the rope theta sits in `rope_parameters` or at top level; `head_dim`
is a decoy (64 or 192 in the published files) that is carried along and never used.
"""

from collections.abc import Collection, Mapping
from typing import Any

from glm_jax.config_fields import (
    FIXED,
    FLOATS,
    MODEL_TYPE,
    OPTIONAL_INTS,
    SIZES,
    IndexerType,
    Problems,
    dense_first,
    describe,
    is_int,
    nearest,
    same,
)
from glm_jax.config_ignored import IGNORED
from glm_jax.config_quantization import read_quantization

# Absent or null keys that have a meaning of their own. Everything else must be given.
_DEFAULTS: dict[str, object] = {
    "latent_norm_eps": 1e-5,  # training and the serving engines; transformers itself runs 1e-6
    "index_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,  # no MTP layer is stored unless the file says so
    "index_share_for_mtp_iteration": False,
}

# Keys read by a rule of their own below.
_RULED = (
    "model_type",
    "dtype",
    "torch_dtype",
    "rope_parameters",
    "rope_scaling",
    "qk_head_dim",
    "layer_types",
    "num_experts",
    "num_local_experts",
    "eos_token_id",
    "indexer_types",
    "index_topk_pattern",
    "mlp_layer_types",
    "first_k_dense_replace",
    "quantization_config",
)

VALID_KEYS = frozenset((*SIZES, *FLOATS, *OPTIONAL_INTS, *FIXED, *_DEFAULTS, *_RULED))

_FOREIGN = {
    "glm5_next": "GLM-5.3-Flash is another architecture (linear attention, pooled indexer)",
    "deepseek_v32": "DeepSeek-V3.2 is another architecture (half-split indexer rope, YaRN)",
}


def foreign_model_type(raw: Mapping[str, Any]) -> str | None:
    """The complaint about a config of another architecture, or None."""
    found = raw.get("model_type")
    if found in (None, MODEL_TYPE):  # without one, the required keys decide
        return None
    reason = "is another architecture"
    if isinstance(found, str):
        reason = _FOREIGN.get(found, reason)
    remedy = f"give a GLM-5, GLM-5.1 or GLM-5.2 checkpoint (model_type {MODEL_TYPE!r})"
    return describe("model_type", found, reason, remedy)


def resolve(raw: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """The fields of `GlmConfig` that `raw` gives; what cannot be read goes into `problems`."""
    _refuse_unknown(raw, VALID_KEYS, problems)
    values: dict[str, Any] = {}
    for field in (*SIZES, *FLOATS, *OPTIONAL_INTS, *_DEFAULTS):
        value = raw.get(field)
        values[field] = _DEFAULTS.get(field) if value is None else value
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]  # nominal: MLA has no groups
    _check_fixed(raw, problems)
    _check_restated(raw, problems)
    values["dtype"] = _dtype(raw, problems)
    values["rope_theta"] = _rope_theta(raw, problems)
    values["eos_token_id"] = _token_ids(raw.get("eos_token_id"))
    values["index_topk_pattern"] = raw.get("index_topk_pattern")
    values["indexer_types"] = _indexer_types(raw, problems)
    values["first_k_dense_replace"], values["mlp_layer_types"] = _mlp_types(raw)
    values["quantization_config"] = read_quantization(raw.get("quantization_config"), problems)
    return values


def _refuse_unknown(
    raw: Mapping[str, Any], valid: Collection[str], problems: Problems, prefix: str = ""
) -> None:
    for key in raw:
        if key in valid or (not prefix and key in IGNORED):
            continue
        hint = nearest(str(key), valid)
        remedy = f"{hint}correct the name, or remove it if the model does not need it"
        problems[f"{prefix}{key}"] = describe(f"{prefix}{key}", raw[key], "is unknown", remedy)


def _check_fixed(raw: Mapping[str, Any], problems: Problems) -> None:
    for field, wanted in FIXED.items():
        value = raw.get(field)
        if value is not None and not same(value, wanted):
            remedy = f"only {field} = {wanted!r} is supported: set that if the checkpoint has it"
            problems[field] = describe(field, value, "is not a GLM-5 model", remedy)


def _check_restated(raw: Mapping[str, Any], problems: Problems) -> None:
    """Keys that only repeat what other keys say must say the same."""
    nope, rope = raw.get("qk_nope_head_dim"), raw.get("qk_rope_head_dim")
    total = raw.get("qk_head_dim")
    # Judged only against two sound widths; each of them has its own check.
    if total is not None and is_int(nope) and is_int(rope) and not same(total, nope + rope):
        reason = f"is not qk_nope_head_dim + qk_rope_head_dim = {nope} + {rope}"
        remedy = f"set {nope + rope}, or remove it"
        problems["qk_head_dim"] = describe("qk_head_dim", total, reason, remedy)
    for field in ("num_experts", "num_local_experts"):
        value, experts = raw.get(field), raw.get("n_routed_experts")
        if value is not None and not same(value, experts):
            reason = f"differs from n_routed_experts = {experts!r}"
            remedy = "set n_routed_experts and remove this second name for it"
            problems[field] = describe(field, value, reason, remedy)
    kinds = raw.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list | tuple) or any(kind != "indexed_attention" for kind in kinds)
    ):
        remedy = "every layer is 'indexed_attention': write that, or remove the key"
        problems["layer_types"] = describe("layer_types", kinds, "is not a GLM-5 model", remedy)


def _dtype(raw: Mapping[str, Any], problems: Problems) -> object:
    found = [raw[key] for key in ("dtype", "torch_dtype") if raw.get(key) is not None]
    if len(found) == 2 and found[0] != found[1]:
        reason, remedy = f"contradicts torch_dtype = {found[1]!r}", "keep one of the two"
        problems["dtype"] = describe("dtype", found[0], reason, remedy)
    return found[0] if found else "bfloat16"


def _rope_theta(raw: Mapping[str, Any], problems: Problems) -> object:
    places = {"rope_theta": raw.get("rope_theta")}
    for block in ("rope_parameters", "rope_scaling"):
        rope = raw.get(block)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            remedy = 'write {"rope_type": "default", "rope_theta": ...}'
            problems["rope_theta"] = describe(block, rope, "must be an object", remedy)
            continue
        _refuse_unknown(rope, ("rope_theta", "rope_type", "type"), problems, f"{block}.")
        for key in ("rope_type", "type"):
            if (kind := rope.get(key)) not in (None, "default"):
                remedy = "GLM-5 uses 'default' at every context length: set that"
                field = f"{block}.{key}"
                problems[field] = describe(field, kind, "is not supported", remedy)
        places[f"{block}.rope_theta"] = rope.get("rope_theta")
    given = {place: theta for place, theta in places.items() if theta is not None}
    if not given:
        remedy = (
            "set rope_parameters.rope_theta (1000000 for GLM-5 and 5.1, 8000000 for GLM-5.2): "
            "the bare default of 10000 is wrong for every published model"
        )
        problems.setdefault("rope_theta", describe("rope_theta", None, "is missing", remedy))
        return None
    (first, theta), *others = given.items()
    for place, other in others:
        if not same(other, theta):
            remedy = "keep one of the two"
            reason = f"contradicts {first} = {theta!r}"
            problems["rope_theta"] = describe(place, other, reason, remedy)
    return theta


def _token_ids(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(value)
    return (value,) if is_int(value) else value


def _sequence(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _indexer_types(raw: Mapping[str, Any], problems: Problems) -> object:
    if raw.get("indexer_types") is not None:
        return _sequence(raw["indexer_types"])
    pattern, layers = raw.get("index_topk_pattern"), raw.get("num_hidden_layers")
    if not is_int(layers) or layers < 1:
        return None  # num_hidden_layers gets the line
    if pattern is None:
        return _from_frequency(raw, layers)
    if not isinstance(pattern, str) or set(pattern) - {"F", "S"}:
        return None  # index_topk_pattern gets the line
    return _from_pattern(pattern, layers, problems)


def _from_pattern(pattern: str, layers: int, problems: Problems) -> object:
    field = "index_topk_pattern"
    if len(pattern) != layers:
        reason = f"has {len(pattern)} letters but num_hidden_layers = {layers}"
        remedy = "give one letter per layer or correct num_hidden_layers"
        problems[field] = describe(field, pattern, reason, remedy)
        return None
    if pattern[0] != "F":
        reason = "starts with S, with no earlier index set"
        problems[field] = describe(field, pattern, reason, "make the first letter F")
        return None
    return tuple("full" if letter == "F" else "shared" for letter in pattern)


def _from_frequency(raw: Mapping[str, Any], layers: int) -> object:
    freq, offset = raw.get("index_topk_freq"), raw.get("index_skip_topk_offset")
    freq = 1 if freq is None else freq
    offset = 2 if offset is None else offset
    if not is_int(freq) or not is_int(offset) or freq < 1 or offset < 0:
        return ("full",) * layers  # the bad one gets the line
    return indexer_types_by_frequency(layers, freq, offset)


def indexer_types_by_frequency(layers: int, freq: int, offset: int) -> tuple[IndexerType, ...]:
    """Layer i, from 0, is full iff max(i - offset + 1, 0) mod freq = 0."""
    return tuple(
        "full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(layers)
    )


def _mlp_types(raw: Mapping[str, Any]) -> tuple[object, object]:
    """(first_k_dense_replace, mlp_layer_types), the one from the other where only one is given."""
    count, kinds = raw.get("first_k_dense_replace"), _sequence(raw.get("mlp_layer_types"))
    layers = raw.get("num_hidden_layers")
    if count is None and isinstance(kinds, tuple):
        count = kinds.count("dense")
    elif kinds is None and is_int(count) and is_int(layers) and 0 <= count <= layers:
        kinds = dense_first(count, layers)
    return count, kinds


def as_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the fields `values`, with every key that transformers and we read.

    Optional keys that are None are left out: transformers fails on an explicit null frequency.
    """
    out: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": values["dtype"],
        **{field: values[field] for field in SIZES},
        "qk_head_dim": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
        **{field: values[field] for field in FLOATS if field != "rope_theta"},
        "rope_parameters": {"rope_theta": values["rope_theta"], "rope_type": "default"},
        **{key: values[key] for key in _DEFAULTS if key not in FLOATS},
        "first_k_dense_replace": values["first_k_dense_replace"],
        "mlp_layer_types": list(values["mlp_layer_types"]),
        "indexer_types": list(values["indexer_types"]),
        **FIXED,
        "bos_token_id": None,
        "eos_token_id": list(values["eos_token_id"]) or None,
        "pad_token_id": values["pad_token_id"],
    }
    for key in ("head_dim", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"):
        if values[key] is not None:
            out[key] = values[key]
    if values["quantization_config"] is not None:
        out["quantization_config"] = values["quantization_config"].to_hf()
    return out
