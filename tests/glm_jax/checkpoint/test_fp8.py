"""FP8 checkpoints: scales multiply, partial blocks, and presence of a scale decides."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from glm_jax.checkpoint.fp8 import dequantise_blocks, quantise_blocks
from glm_jax.checkpoint.hub import load_hub, save_hub
from glm_jax.checkpoint.hub_layout import hub_tensors
from glm_jax.config import GlmConfig
from glm_jax.config_quantization import Fp8Quantization
from tests.glm_jax.checkpoint.helpers import (
    assert_same,
    random_model,
    read_tensors,
    refusal,
    short,
    write_tensors,
)

FP8 = ml_dtypes.float8_e4m3fn
BF16 = np.dtype(ml_dtypes.bfloat16)
WK = "model.layers.0.self_attn.indexer.wk.weight"


def partial_blocks() -> GlmConfig:
    """Widths that leave partial blocks on both axes; kv_a has 144 rows, kv_b heads of 44."""
    sizes = {"hidden_size": 192, "q_lora_rank": 144, "kv_lora_rank": 128, "index_head_dim": 48}
    return short(dtype="bfloat16", **sizes, num_attention_heads=6, num_key_value_heads=6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(FP8 checkpoint, its dequantised BF16 copy), the latter made by the formula as it stands."""
    root = tmp_path_factory.mktemp("fp8")
    cfg = partial_blocks()
    save_hub(random_model(cfg), root / "fp8", fp8=True)
    stored = read_tensors(root / "fp8")
    plain = {}
    for name, array in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if (scale := stored.get(f"{name}_scale_inv")) is not None:
            expanded = np.kron(scale, np.ones((128, 128), np.float32))
            cropped = expanded[: array.shape[0], : array.shape[1]]
            array = (array.astype(np.float32) * cropped).astype(BF16)
        plain[name] = array
    write_tensors(root / "plain", cfg, plain)
    return root / "fp8", root / "plain"


def test_fp8_loads_to_the_bits_of_its_dequantised_copy(pair: tuple[Path, Path]) -> None:
    assert_same(load_hub(pair[0]), load_hub(pair[1]))


def test_fp8_loads_to_the_same_bits_through_the_device_path(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_hub(pair[1])
    monkeypatch.setattr("glm_jax.checkpoint.boxes.SMALL_BYTES", 60_000)
    monkeypatch.setattr("glm_jax.checkpoint.boxes.STRIP_BYTES", 20_000)
    assert_same(load_hub(pair[0]), plain)


def test_the_fp8_export_has_the_published_form(pair: tuple[Path, Path]) -> None:
    stored, cfg = read_tensors(pair[0]), GlmConfig.from_json(pair[0])
    assert cfg.quantization_config == Fp8Quantization()
    scale = stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"]
    assert scale.dtype == np.float32 and scale.shape == (2, 2)
    kept = {name for name, array in stored.items() if array.dtype == BF16}
    assert kept == {t.name for t in hub_tensors(cfg) if not t.fp8 and t.kind != "bias"}
    assert stored[WK].dtype == FP8 and f"{WK}_scale_inv" in stored
    for name in (
        "lm_head.weight",
        "model.layers.3.eh_proj.weight",
        "model.layers.1.mlp.gate.weight",
    ):
        assert name in kept
    assert "model.layers.0.self_attn.indexer.weights_proj.weight" in kept


def test_any_matrix_with_a_scale_is_dequantised_whatever_its_name(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    stored = read_tensors(pair[1])
    for name in ("lm_head.weight", "model.layers.1.mlp.gate.weight"):
        quantised, scale = quantise_blocks(stored[name])
        kind = np.float32 if "gate" in name else BF16
        stored[name] = dequantise_blocks(quantised, scale, np.dtype(kind))
        stored[f"{name}_new"], stored[f"{name}_scale"] = quantised, scale
    plain = {name: array for name, array in stored.items() if not name.endswith(("_new", "_scale"))}
    mixed = dict(plain)
    for name in ("lm_head.weight", "model.layers.1.mlp.gate.weight"):
        mixed[name], mixed[f"{name}_scale_inv"] = stored[f"{name}_new"], stored[f"{name}_scale"]
    cfg = partial_blocks()
    one = load_hub(write_tensors(tmp_path / "mixed", cfg, mixed))
    assert_same(one, load_hub(write_tensors(tmp_path / "plain", cfg, plain)))


def test_fp8_can_be_loaded_in_f32(pair: tuple[Path, Path]) -> None:
    stored = read_tensors(pair[0])
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = dequantise_blocks(stored[name], stored[f"{name}_scale_inv"], np.dtype(np.float32))
    model = load_hub(pair[0], dtype="float32")
    assert np.array_equal(model.segments[0].blocks[0].feed_forward.down.get_value()[0], wanted.T)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("no scale", f"FP8 weight without scale (1): .*\n    {WK} needs {WK}_scale_inv"),
        ("no weight", f"scale without FP8 weight (1): .*\n    {WK}_scale_inv ({WK} is missing)"),
        ("plain weight", f"scale without FP8 weight (1): .*\n    {WK}_scale_inv ({WK} is BF16)"),
        ("shape", f"wrong scale (1): .*\n    {WK}_scale_inv is F32 [1, 1], expected F32 [1, 2]"),
        ("dtype", f"wrong scale (1): .*\n    {WK}_scale_inv is BF16 [1, 2], expected F32 [1, 2]"),
        (
            "norm",
            "wrong scale (1): .*\n    model.norm.weight_scale_inv model.norm.weight is no matrix",
        ),
    ],
)
def test_a_wrong_or_forgotten_scale_is_named(
    damage: str, expected: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    stored, scale = read_tensors(pair[0]), f"{WK}_scale_inv"
    match damage:
        case "no scale":
            del stored[scale]
        case "no weight":
            del stored[WK]
        case "plain weight":
            stored[WK] = stored[WK].astype(BF16)
        case "shape":
            stored[scale] = np.ascontiguousarray(stored[scale][:, :1])
        case "dtype":
            stored[scale] = stored[scale].astype(BF16)
        case "norm":
            stored["model.norm.weight"] = stored["model.norm.weight"].astype(FP8)
            stored["model.norm.weight_scale_inv"] = np.ones((1, 1), np.float32)
    text = refusal(write_tensors(tmp_path / "in", partial_blocks(), stored))
    first, second = expected.split(".*")
    assert first in text and second in text


def test_quantising_is_exact_at_the_largest_value_and_on_zero_blocks(
    rng: np.random.Generator,
) -> None:
    weight = rng.standard_normal((192, 300), np.float32)
    weight[:128, :128] = 0
    weight[130, 140] = 1000
    quantised, scale = quantise_blocks(weight)
    assert quantised.dtype == FP8 and scale.shape == (2, 3) and scale[0, 0] == 1
    assert math.isclose(scale[1, 1], 1000 / 448, rel_tol=1e-6)
    assert float(quantised[130, 140]) == 448
    back = dequantise_blocks(quantised, scale, np.dtype(np.float32))
    # Half a step of e4m3's three mantissa bits, or of its smallest step near zero.
    step = np.kron(scale, np.ones((128, 128)))[:192, :300] * 2.0**-10
    assert (np.abs(back - weight) <= np.maximum(np.abs(weight) / 16, step) * 1.0001).all()
    assert not back[:128, :128].any()
