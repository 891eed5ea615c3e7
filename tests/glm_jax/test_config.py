"""GlmConfig: round trips, the rules for reading config.json, and every refusal."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from glm_jax.config import GlmConfig
from glm_jax.config_hf import VALID_KEYS
from glm_jax.config_ignored import IGNORED
from glm_jax.config_quantization import Fp8Quantization
from glm_jax.errors import GlmError
from glm_jax.presets import PRESETS, preset

GLM_5_2_FULL = (0, 1, 2, *range(6, 75, 4))
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
DROP = object()  # marks a key to remove


def raw_config(name: str = "tiny", **changes: Any) -> dict[str, Any]:
    """The config.json of a preset with some keys changed or dropped."""
    raw = {**preset(name).to_hf(), **changes}
    return {key: value for key, value in raw.items() if value is not DROP}


def full_layers(config: GlmConfig) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(config.indexer_types) if kind == "full")


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(GlmError) as caught:
        GlmConfig.from_hf(raw, source="here/config.json")
    return str(caught.value)


# Round trips.


@pytest.mark.parametrize("name", PRESETS)
def test_to_hf_and_back_is_the_identity(name: str, tmp_path: Path) -> None:
    config = preset(name)
    again = GlmConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    assert again == config and hash(again) == hash(config)
    assert config.save_json(tmp_path) == tmp_path / "config.json"
    assert GlmConfig.from_json(tmp_path) == config
    assert GlmConfig.from_json(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    "changes",
    [
        {"latent_norm_eps": 1e-6, "index_norm_eps": 3e-6, "initializer_range": 0.1},
        {"dtype": "bfloat16", "eos_token_id": (), "pad_token_id": None, "head_dim": None},
        {"eos_token_id": (7,), "index_topk_pattern": "FFFSSSFS", "index_topk_freq": None},
        {"quantization_config": Fp8Quantization(modules_to_not_convert=("lm_head",))},
        {"first_k_dense_replace": 8, "mlp_layer_types": ("dense",) * 8},
        {"num_nextn_predict_layers": 0, "index_share_for_mtp_iteration": False},
    ],
)
def test_every_optional_field_survives_the_round_trip(changes: dict[str, Any]) -> None:
    config = preset("tiny").with_overrides(**changes)
    assert GlmConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert config != preset("tiny")


def test_to_hf_writes_every_field_that_is_not_none() -> None:
    config = preset("glm-5.2").with_overrides(quantization_config=Fp8Quantization())
    written = config.to_hf()
    inside = {"rope_theta": written["rope_parameters"]["rope_theta"]}
    for field in dataclasses.fields(config):
        if getattr(config, field.name) is not None:
            assert field.name in {**written, **inside}, field.name
    assert written["model_type"] == "glm_moe_dsa"


def test_to_hf_leaves_out_a_null_frequency_because_transformers_fails_on_it() -> None:
    assert "index_topk_freq" not in preset("glm-5").to_hf()


# Presets.


def test_presets_hold_the_published_values() -> None:
    glm_5, glm_5_2 = preset("glm-5").to_hf(), preset("glm-5.2").to_hf()
    assert preset("glm-5.1") == preset("glm-5")
    differing = {key for key in glm_5 | glm_5_2 if glm_5.get(key) != glm_5_2.get(key)}
    assert differing == {
        "max_position_embeddings",
        "rope_parameters",
        "head_dim",
        "index_topk_freq",
        "index_skip_topk_offset",
        "indexer_types",
        "index_share_for_mtp_iteration",
    }
    published = {
        "vocab_size": 154880,
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "rms_norm_eps": 1e-5,
        "latent_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 1,
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
        "dtype": "bfloat16",
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    }
    assert {key: glm_5_2[key] for key in published} == published
    assert (glm_5["max_position_embeddings"], glm_5_2["max_position_embeddings"]) == (
        202752,
        1048576,
    )
    assert glm_5["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert glm_5_2["rope_parameters"] == {"rope_type": "default", "rope_theta": 8e6}
    assert (glm_5["head_dim"], glm_5_2["head_dim"]) == (64, 192)
    assert glm_5_2["index_share_for_mtp_iteration"] is True


def test_small_is_the_benchmark_config() -> None:
    small = preset("small")
    assert (small.vocab_size, small.hidden_size, small.num_hidden_layers) == (512, 256, 6)
    assert (small.intermediate_size, small.moe_intermediate_size) == (512, 128)
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 8)
    assert (small.q_lora_rank, small.kv_lora_rank) == (128, 64)
    assert (small.qk_nope_head_dim, small.qk_rope_head_dim, small.v_head_dim) == (32, 16, 32)
    assert (small.index_n_heads, small.index_head_dim, small.index_topk) == (4, 32, 64)
    assert (small.n_routed_experts, small.num_experts_per_tok, small.n_shared_experts) == (16, 4, 1)
    assert small.mlp_layer_types == ("dense", *("sparse",) * 5)
    # The explicit list differs from what the frequency rule of the same file would give.
    assert (small.index_topk_freq, small.index_skip_topk_offset) == (4, 3)
    assert full_layers(small) == (0, 1, 4)
    assert (small.max_position_embeddings, small.rope_theta) == (2048, 8e6)
    assert (small.eos_token_id, small.pad_token_id) == ((), 0)
    assert (small.num_nextn_predict_layers, small.head_dim) == (0, 16)


def test_tiny_has_every_kind_of_layer_and_an_mtp_layer() -> None:
    tiny = preset("tiny")
    assert set(tiny.layer_kinds) == {("dense", "full"), ("sparse", "full"), ("sparse", "shared")}
    assert tiny.num_nextn_predict_layers == 1
    assert tiny.index_topk < 16


def test_an_unknown_preset_names_the_nearest_and_lists_all() -> None:
    with pytest.raises(GlmError, match=r"'glm5\.2' is unknown: did you mean 'glm-5\.2'") as caught:
        preset("glm5.2")
    assert all(name in str(caught.value) for name in PRESETS)


# Rules.


@pytest.mark.parametrize(
    "route",
    [
        {},
        {"index_topk_freq": 7, "index_topk_pattern": "S" * 5},  # explicit types win over both
        {
            "indexer_types": None,
            "index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS",
            "index_topk_freq": 1,  # the pattern wins over the frequency
        },
        {"indexer_types": DROP},
    ],
    ids=["explicit", "explicit-wins", "pattern", "freq"],
)
def test_glm_5_2_has_full_layers_0_1_2_6_to_74_by_every_route(route: dict[str, Any]) -> None:
    config = GlmConfig.from_hf(raw_config("glm-5.2", **route))
    assert full_layers(config) == GLM_5_2_FULL
    assert len(GLM_5_2_FULL) == 21


@pytest.mark.parametrize("freq", [DROP, None, 1])
def test_an_absent_or_null_frequency_makes_every_layer_full(freq: object) -> None:
    raw = raw_config("glm-5", indexer_types=DROP, index_topk_freq=freq)
    assert full_layers(GlmConfig.from_hf(raw)) == tuple(range(78))


@pytest.mark.parametrize("offset", [DROP, None, 2])
def test_an_absent_or_null_offset_is_two(offset: object) -> None:
    raw = raw_config(indexer_types=DROP, index_skip_topk_offset=offset)
    assert full_layers(GlmConfig.from_hf(raw)) == (0, 1, 5)


def test_theta_is_read_from_either_place() -> None:
    top = raw_config(rope_parameters=DROP, rope_theta=5000)
    nested = raw_config(rope_parameters={"rope_theta": 5000.0})
    both = raw_config(rope_parameters={"rope_theta": 5000.0}, rope_theta=5000)
    legacy = raw_config(rope_parameters=None, rope_scaling={"type": "default", "rope_theta": 5e3})
    configs = {GlmConfig.from_hf(raw) for raw in (top, nested, both, legacy)}
    assert {config.rope_theta for config in configs} == {5000.0} and len(configs) == 1
    assert isinstance(configs.pop().rope_theta, float)


@pytest.mark.parametrize("decoy", [DROP, None, 64, 192, 1])
def test_the_decoy_head_dim_changes_nothing_else(decoy: object) -> None:
    config = GlmConfig.from_hf(raw_config("glm-5.2", head_dim=decoy))
    assert config.with_overrides(head_dim=192) == preset("glm-5.2")
    assert (config.qk_head_dim, config.cache_width, config.softmax_scale) == (256, 576, 1 / 16)


def test_dense_layers_come_from_either_key() -> None:
    by_count = GlmConfig.from_hf(raw_config(mlp_layer_types=DROP))
    by_types = GlmConfig.from_hf(raw_config(first_k_dense_replace=DROP))
    assert by_count == by_types == preset("tiny")


def test_dtype_is_read_under_both_names() -> None:
    assert GlmConfig.from_hf(raw_config(dtype=DROP, torch_dtype="float32")).dtype == "float32"
    assert GlmConfig.from_hf(raw_config(dtype="float32", torch_dtype="float32")).dtype == "float32"
    assert GlmConfig.from_hf(raw_config(dtype=None)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("given", "read"), [(None, ()), (DROP, ()), (5, (5,)), ([], ()), ([3, 4], (3, 4))]
)
def test_end_tokens_may_be_one_many_or_none(given: object, read: tuple[int, ...]) -> None:
    assert GlmConfig.from_hf(raw_config(eos_token_id=given)).eos_token_id == read


def test_absent_keys_with_one_meaning_are_filled_in() -> None:
    keys = ("latent_norm_eps", "index_norm_eps", "initializer_range", "num_key_value_heads")
    keys += ("hidden_act", "scoring_func", "n_group", "model_type", "moe_router_dtype")
    raw = raw_config(**dict.fromkeys(keys, DROP))
    assert GlmConfig.from_hf(raw) == preset("tiny")
    bare = raw_config(num_nextn_predict_layers=DROP, index_share_for_mtp_iteration=DROP)
    config = GlmConfig.from_hf(bare)
    assert (config.num_nextn_predict_layers, config.index_share_for_mtp_iteration) == (0, False)


def test_keys_without_meaning_here_are_accepted_and_have_a_reason() -> None:
    raw = raw_config(**dict.fromkeys(IGNORED, "anything"))
    assert GlmConfig.from_hf(raw) == preset("tiny")
    assert all(IGNORED.values()) and not VALID_KEYS & IGNORED.keys()


def test_restated_keys_are_accepted_when_they_agree() -> None:
    raw = raw_config(num_local_experts=16, num_experts=16, layer_types=["indexed_attention"] * 8)
    assert GlmConfig.from_hf(raw) == preset("tiny")


def test_an_fp8_block_is_kept() -> None:
    block = {**FP8, "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    config = GlmConfig.from_hf(raw_config(quantization_config=block))
    assert config.quantization_config == Fp8Quantization(modules_to_not_convert=("lm_head",))
    assert config.quantization_config.weight_block_size == (128, 128)
    assert config.to_hf()["quantization_config"] == block
    assert GlmConfig.from_hf(raw_config(quantization_config=None)) == preset("tiny")


def test_layer_kinds_pair_the_two_lists() -> None:
    tiny = preset("tiny")
    assert tiny.layer_kinds == (
        *(("dense", "full"),) * 3,
        *(("sparse", "shared"),) * 3,
        ("sparse", "full"),
        ("sparse", "shared"),
    )


def test_overrides_are_checked_and_leave_the_original_alone() -> None:
    tiny = preset("tiny")
    other = tiny.with_overrides(latent_norm_eps=1e-6, dtype="bfloat16")
    assert (other.latent_norm_eps, other.dtype) == (1e-6, "bfloat16")
    assert (tiny.latent_norm_eps, tiny.dtype) == (1e-5, "float32")
    with pytest.raises(GlmError, match="dtype = 'float16': is not supported; use one of bfloat16"):
        tiny.with_overrides(dtype="float16")
    with pytest.raises(GlmError, match="latent_eps = 1: is unknown; did you mean 'latent_norm_eps"):
        tiny.with_overrides(latent_eps=1)


# Refusals: (changes to a good file, field named, value shown, part of the remedy).

REFUSALS: list[tuple[dict[str, Any], str, str, str]] = [
    # Another architecture.
    ({"model_type": "glm5_next"}, "model_type", "'glm5_next'", "give a GLM-5"),
    ({"model_type": "deepseek_v32"}, "model_type", "'deepseek_v32'", "give a GLM-5"),
    ({"model_type": "llama"}, "model_type", "'llama'", "model_type 'glm_moe_dsa'"),
    # Unknown names.
    ({"hiden_size": 3}, "hiden_size", "3", "did you mean 'hidden_size'?"),
    ({"quux": [1]}, "quux", "[1]", "remove it"),
    (
        {"rope_parameters": {"rope_theta": 1e6, "factor": 4}},
        "rope_parameters.factor",
        "4",
        "remove it",
    ),
    # Missing, mistyped, out of range.
    ({"index_topk": DROP}, "index_topk", "None", "give the whole number"),
    ({"rms_norm_eps": None}, "rms_norm_eps", "None", "give the number"),
    ({"hidden_size": True}, "hidden_size", "True", "correct it"),
    ({"hidden_size": "64"}, "hidden_size", "'64'", "correct it"),
    ({"hidden_size": 64.0}, "hidden_size", "64.0", "correct it"),
    ({"num_hidden_layers": 0}, "num_hidden_layers", "0", "correct it"),
    ({"index_n_heads": -1}, "index_n_heads", "-1", "correct it"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps", "nan", "correct it"),
    ({"latent_norm_eps": 0}, "latent_norm_eps", "0", "correct it"),
    ({"index_norm_eps": "1e-6"}, "index_norm_eps", "'1e-6'", "not a string"),
    ({"routed_scaling_factor": math.inf}, "routed_scaling_factor", "inf", "correct it"),
    ({"initializer_range": True}, "initializer_range", "True", "correct it"),
    ({"head_dim": "64"}, "head_dim", "'64'", "correct or remove it"),
    ({"index_topk_freq": 0}, "index_topk_freq", "0", "correct or remove it"),
    ({"index_skip_topk_offset": -1}, "index_skip_topk_offset", "-1", "correct or remove it"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers", "2", "set 1 if"),
    ({"index_share_for_mtp_iteration": 1}, "index_share_for_mtp_iteration", "1", "boolean"),
    ({"dtype": "float16"}, "dtype", "'float16'", "bfloat16, float32"),
    ({"torch_dtype": "bfloat16"}, "dtype", "'float32'", "keep one of the two"),
    ({"eos_token_id": "x"}, "eos_token_id", "'x'", "whole numbers"),
    ({"eos_token_id": [1, True]}, "eos_token_id", "[1, True]", "whole numbers"),
    ({"eos_token_id": 160}, "eos_token_id", "[160]", "correct vocab_size"),
    ({"pad_token_id": 1000}, "pad_token_id", "1000", "correct vocab_size"),
    # Layers.
    ({"indexer_types": ["full"]}, "indexer_types", "['full']", "one entry per layer"),
    ({"indexer_types": "full"}, "indexer_types", "'full'", "use 'full' or 'shared'"),
    ({"indexer_types": ["full", "half"] * 4}, "indexer_types", "'half'", "use only 'full'"),
    ({"indexer_types": ["shared"] * 8}, "indexer_types", "['shared', ", "make it full"),
    (
        {"indexer_types": None, "index_topk_pattern": "FFX"},
        "index_topk_pattern",
        "'FFX'",
        "write e.g. 'FFFSSSF'",
    ),
    ({"index_topk_pattern": ["F"]}, "index_topk_pattern", "['F']", "indexer_types instead"),
    (
        {"indexer_types": None, "index_topk_pattern": "FFSS"},
        "index_topk_pattern",
        "'FFSS'",
        "one letter per layer",
    ),
    (
        {"indexer_types": None, "index_topk_pattern": "SFSSSFSS"},
        "index_topk_pattern",
        "'SFSSSFSS'",
        "make the first letter F",
    ),
    ({"indexer_types": None, "index_skip_topk_offset": 0}, "indexer_types", "['shared'", "full"),
    ({"mlp_layer_types": ["dense"] * 9}, "mlp_layer_types", "['dense', ", "one entry per layer"),
    ({"mlp_layer_types": ["moe"] * 8}, "mlp_layer_types", "'moe'", "use only 'dense'"),
    ({"mlp_layer_types": ["sparse"] * 7 + ["dense"]}, "mlp_layer_types", "[7]", "dense layers fi"),
    ({"first_k_dense_replace": 2}, "first_k_dense_replace", "2", "correct one of the two"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace", "-1", "number of dense layers"),
    (
        {"first_k_dense_replace": 9, "mlp_layer_types": DROP},
        "first_k_dense_replace",
        "9",
        "set at most 8",
    ),
    (
        {"first_k_dense_replace": DROP, "mlp_layer_types": DROP},
        "first_k_dense_replace",
        "None",
        "give it or mlp_layer_types",
    ),
    ({"layer_types": ["full_attention"] * 8}, "layer_types", "['full_att", "'indexed_attention'"),
    # Rope.
    ({"rope_parameters": DROP}, "rope_theta", "None", "8000000 for GLM-5.2"),
    ({"rope_theta": 1e6}, "rope_parameters.rope_theta", "8000000.0", "keep one of the two"),
    ({"rope_parameters": 8e6}, "rope_parameters", "8000000.0", '{"rope_type": "default"'),
    ({"rope_parameters": {"rope_theta": "8e6"}}, "rope_theta", "'8e6'", "not a string"),
    (
        {"rope_parameters": {"rope_theta": 8e6, "rope_type": "yarn"}},
        "rope_parameters.rope_type",
        "'yarn'",
        "set that",
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type", "'linear'", "set that"),
    ({"rope_interleave": False}, "rope_interleave", "False", "rope_interleave = True"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave", "False", "only"),
    # Rules between fields.
    ({"qk_head_dim": 64}, "qk_head_dim", "64", "set 40, or remove it"),
    ({"num_key_value_heads": 2}, "num_key_value_heads", "2", "set it to 4"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok", "17", "choose at most 16"),
    ({"num_local_experts": 8}, "num_local_experts", "8", "set n_routed_experts"),
    (
        {"qk_rope_head_dim": 15, "qk_head_dim": DROP},
        "qk_rope_head_dim",
        "15",
        "use an even number",
    ),
    (
        {"qk_rope_head_dim": 34, "qk_head_dim": DROP},
        "qk_rope_head_dim",
        "34",
        "at most index_head_dim",
    ),
    # One value only.
    ({"hidden_act": "gelu"}, "hidden_act", "'gelu'", "only hidden_act = 'silu'"),
    ({"scoring_func": "softmax"}, "scoring_func", "'softmax'", "'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method", "'greedy'", "'noaux_tc'"),
    ({"n_group": 8}, "n_group", "8", "only n_group = 1"),
    ({"topk_group": 4}, "topk_group", "4", "only topk_group = 1"),
    ({"n_group": True}, "n_group", "True", "only n_group = 1"),
    ({"norm_topk_prob": False}, "norm_topk_prob", "False", "only norm_topk_prob = True"),
    ({"moe_layer_freq": 2}, "moe_layer_freq", "2", "only moe_layer_freq = 1"),
    ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype", "'bfloat16'", "'float32'"),
    ({"attention_bias": True}, "attention_bias", "True", "only attention_bias = False"),
    ({"attention_dropout": 0.1}, "attention_dropout", "0.1", "only attention_dropout = 0.0"),
    ({"mlp_bias": True}, "mlp_bias", "True", "only mlp_bias = False"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings", "True", "only tie_word_embeddings"),
    # Quantisation.
    ({"quantization_config": "fp8"}, "quantization_config", "'fp8'", "or null"),
    (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "quantization_config.quant_method",
        "'modelopt'",
        "use the BF16 or the FP8 release",
    ),
    (
        {"quantization_config": {**FP8, "fmt": "e5m2"}},
        "quantization_config.fmt",
        "'e5m2'",
        "only 'e4m3'",
    ),
    (
        {"quantization_config": {**FP8, "weight_block_size": [64, 64]}},
        "quantization_config.weight_block_size",
        "[64, 64]",
        "only [128, 128]",
    ),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config.weight_block_size",
        "None",
        "only [128, 128]",
    ),
    (
        {"quantization_config": {**FP8, "activation_scheme": "static"}},
        "quantization_config.activation_scheme",
        "'static'",
        "only 'dynamic'",
    ),
    (
        {"quantization_config": {**FP8, "scale": 1}},
        "quantization_config.scale",
        "1",
        "correct or remove it",
    ),
    (
        {"quantization_config": {**FP8, "modules_to_not_convert": [1]}},
        "quantization_config.modules_to_not_convert",
        "[1]",
        "correct or remove it",
    ),
]


@pytest.mark.parametrize(("changes", "field", "value", "remedy"), REFUSALS)
def test_a_refusal_is_one_line_that_names_field_value_and_remedy(
    changes: dict[str, Any], field: str, value: str, remedy: str
) -> None:
    text = refusal(raw_config(**changes))
    assert text.startswith(f"here/config.json: {field} = "), text
    assert value in text and remedy in text.split(";", 1)[1], text
    assert "\n" not in text, "one mistake must give one line"


def test_another_architecture_is_named_as_such() -> None:
    assert "GLM-5.3-Flash is another architecture" in refusal(raw_config(model_type="glm5_next"))
    assert "DeepSeek-V3.2 is another architecture" in refusal(raw_config(model_type="deepseek_v32"))


def test_all_offending_fields_come_in_one_error() -> None:
    raw = raw_config(hiden_size=1, n_group=2, vocab_size="x", index_topk=DROP, pad_token_id=-1)
    raw["quantization_config"] = {"quant_method": "awq"}
    text = refusal(raw)
    fields = ("hiden_size", "n_group", "vocab_size", "index_topk", "pad_token_id")
    assert all(f"\n  - {field} = " in text for field in fields)
    assert "\n  - quantization_config.quant_method = 'awq'" in text
    assert "6 fields" in text


@pytest.mark.parametrize("value", [None, True, -1, math.nan, "x", [], [[]], {}, {"a": 1}])
def test_no_value_of_a_known_key_escapes_as_another_exception(value: object) -> None:
    # Whatever a file holds, it is read to a sound config or refused by a GlmError.
    for key in VALID_KEYS | IGNORED.keys():
        try:
            config = GlmConfig.from_hf(raw_config(**{key: value}))
        except GlmError as error:
            assert key in str(error)
        else:
            hash(config)


def test_the_constructor_checks_like_the_reader() -> None:
    fields = dataclasses.asdict(preset("tiny")) | {"index_topk": 0, "num_experts_per_tok": 99}
    with pytest.raises(GlmError, match=r"(?s)index_topk = 0: .*num_experts_per_tok = 99: "):
        GlmConfig(**fields)


# Files.


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GlmError, match=r"absent: no such file or directory; give a checkpoint"):
        GlmConfig.from_json(tmp_path / "absent")
    with pytest.raises(GlmError, match=r"the directory has no config\.json; give the directory"):
        GlmConfig.from_json(tmp_path)
    file = write(tmp_path / "config.json", '{"vocab_size": ')
    with pytest.raises(GlmError, match=r"config\.json: is not valid JSON .*; copy the file again"):
        GlmConfig.from_json(tmp_path)
    write(file, "[1, 2]")
    with pytest.raises(GlmError, match=r"config\.json: holds a list, not an object; give a model"):
        GlmConfig.from_json(tmp_path)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(GlmError, match=r"config\.json: is not valid JSON .*utf-8"):
        GlmConfig.from_json(file)
    write(file, '{"index_topk": 1, "index_topk": 2}')
    with pytest.raises(GlmError, match=r"'index_topk' is given twice: 1 and 2.*correct it"):
        GlmConfig.from_json(file)
    write(file, json.dumps(raw_config(n_group=3)))
    with pytest.raises(GlmError, match=r"config\.json: n_group = 3"):
        GlmConfig.from_json(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(GlmError, match=r"config\.json: cannot be written .*existing directory"):
        preset("tiny").save_json(tmp_path / "absent" / "config.json")


def test_absent_null_and_too_large_sizes_are_named():
    raw = preset("tiny").to_hf()
    for value, reason in (
        (None, "is missing or null"),
        (10**30, "must be a whole number from 1 to 2147483647"),
    ):
        with pytest.raises(GlmError, match=f"hidden_size = {value}: {reason}"):
            GlmConfig.from_hf(raw | {"hidden_size": value})
    del raw["hidden_size"]
    with pytest.raises(GlmError, match="hidden_size = None: is missing or null"):
        GlmConfig.from_hf(raw)


def test_a_long_list_of_problems_is_cut():
    with pytest.raises(GlmError, match=r"\n  \.\.\. and \d+ more$"):
        GlmConfig.from_hf({"model_type": "glm_moe_dsa", **{f"unknown_{i}": i for i in range(30)}})
