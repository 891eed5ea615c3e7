"""Damaged and foreign checkpoints: one error that names every offender and what to do."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from glm_jax.checkpoint import boxes
from glm_jax.checkpoint.hub import load_hub
from tests.glm_jax.checkpoint.helpers import (
    FIXTURE,
    assert_same,
    read_index,
    read_tensors,
    refusal,
    tiny,
    write_index,
    write_tensors,
)

SHARD_1, SHARD_2 = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "copy"))


# The directory.


def test_a_wrong_place_is_named(tmp_path: Path) -> None:
    assert "nowhere: no such directory" in refusal(tmp_path / "nowhere")
    assert "config.json: is a file; give the directory" in refusal(FIXTURE / "config.json")
    assert "has no config.json" in refusal(tmp_path)


def test_a_foreign_model_is_named(copy: Path) -> None:
    raw = json.loads((copy / "config.json").read_text()) | {"model_type": "llama"}
    (copy / "config.json").write_text(json.dumps(raw))
    assert "model_type: 'llama'" in refusal(copy).replace(" = ", ": ")


def test_a_directory_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    tiny().save_json(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "it holds config.json, pytorch_model.bin" in refusal(tmp_path)


def test_shards_without_their_index_are_refused(copy: Path) -> None:
    (copy / "model.safetensors.index.json").unlink()
    assert "has 2 shards but no model.safetensors.index.json" in refusal(copy)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is no readable index"),
        ("[]", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "'../b.safetensors'; give the plain name"),
        ('{"weight_map": {"a": 1}}', "gives a the file 1"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "'a' is given twice"),
    ],
)
def test_an_unusable_index_is_named(text: str, expected: str, copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    found = refusal(copy)
    assert "model.safetensors.index.json" in found and expected in found


# Files.


def test_a_missing_shard_is_named_once_and_not_each_of_its_tensors(copy: Path) -> None:
    (copy / SHARD_2).unlink()
    count = list(read_index(copy).values()).count(SHARD_2)
    text = refusal(copy)
    assert (
        f"missing file (1): copy the checkpoint again, all of it\n    {SHARD_2} ({count} tensors)"
        in text
    )
    assert "missing tensor" not in text and len(text.splitlines()) == 3


def test_a_surplus_shard_is_named(copy: Path) -> None:
    shutil.copy(copy / SHARD_2, copy / "model-00003-of-00002.safetensors")
    assert "surplus file (1)" in (text := refusal(copy))
    assert "model-00003-of-00002.safetensors is not part of the checkpoint" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "no safetensors file; 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "no safetensors file; 21 bytes"),
        ((1000).to_bytes(8, "little") + b"{", "cut off within its header"),
        ((2).to_bytes(8, "little") + b"{]", "Expecting property name"),
        ((1).to_bytes(8, "little") + b"7", "its header is no JSON object"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_named(
    content: bytes, expected: str, copy: Path
) -> None:
    (copy / SHARD_1).write_bytes(content)
    text = refusal(copy)
    assert f"unreadable file (1): copy it again, as a binary file\n    {SHARD_1} (" in text
    assert expected in text and "missing tensor" not in text


def last_tensors(path: Path, count: int) -> list[tuple[str, int]]:
    """(name, end) of the last tensors of a file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    ends = [
        (name, entry["data_offsets"][1]) for name, entry in header.items() if "data" in str(entry)
    ]
    return sorted(ends, key=lambda pair: pair[1])[-count:]


def test_every_truncated_tensor_is_named_with_its_file(copy: Path) -> None:
    (_, kept), (one, _), (two, end) = last_tensors(copy / SHARD_2, 3)
    data = (copy / SHARD_2).read_bytes()
    (copy / SHARD_2).write_bytes(data[: len(data) - (end - kept) + 4])
    text = refusal(copy)
    assert "truncated tensor (2)" in text and "missing tensor" not in text
    assert f"    {one} {SHARD_2} ends" in text and f"    {two} {SHARD_2} ends" in text


def test_bytes_after_the_last_tensor_are_noticed(copy: Path) -> None:
    with (copy / SHARD_2).open("ab") as stream:
        stream.write(b"123")
    assert f"{SHARD_2} has 3 bytes after its last tensor" in refusal(copy)


def write_raw(path: Path, header: str, size: int) -> None:
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('{"a":X,"a":X}', "duplicate tensor (1): keep one of the copies\n    a twice in"),
        ('{"a":X,"b":X}', "overlapping tensor (1): the file was written wrongly"),
        ('{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', "dtype 'F99' is unknown"),
        (
            '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
            "holds 4 bytes; F32 [2] takes 8",
        ),
        ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}', "must be whole numbers"),
        ('{"a":{"shape":[1],"data_offsets":[0,4]}}', "malformed entry (1)"),
        ('{"a":7}', "malformed entry (1)"),
    ],
)
def test_a_malformed_header_names_the_tensor(header: str, expected: str, tmp_path: Path) -> None:
    tiny().save_json(tmp_path)
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    write_raw(tmp_path / "model.safetensors", header.replace("X", entry), 4)
    assert expected in refusal(tmp_path)


def test_index_and_shards_must_agree(copy: Path) -> None:
    index = read_index(copy)
    moved = next(name for name, file in index.items() if file == SHARD_1)
    dropped = next(name for name, file in index.items() if file == SHARD_2)
    write_index(
        copy, {name: file for name, file in index.items() if name != dropped} | {moved: SHARD_2}
    )
    text = refusal(copy)
    assert (
        "tensor not in its file (1): " in text and f"    {moved} the index says {SHARD_2}" in text
    )
    assert "tensor not in the index (1): " in text and f"    {dropped} in {SHARD_2}" in text


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    stored = read_tensors(FIXTURE)
    twice = {"lm_head.weight": stored["lm_head.weight"]}
    source = write_tensors(tmp_path / "in", tiny(), stored, twice)
    assert f"duplicate tensor (1): keep one of the copies\n    lm_head.weight in {SHARD_1} and" in (
        refusal(source)
    )


# Names, shapes and dtypes.


def test_one_error_lists_offenders_of_every_kind(tmp_path: Path) -> None:
    stored = read_tensors(FIXTURE)
    del stored["model.norm.weight"], stored["model.layers.5.mlp.experts.3.up_proj.weight"]
    stored["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    stored["lm_head.weight"] = np.ascontiguousarray(stored["lm_head.weight"].T)
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
        stored[name] = stored[name].astype(ml_dtypes.bfloat16)
    bias = "model.layers.4.mlp.gate.e_score_correction_bias"
    stored[bias] = stored[bias].astype(ml_dtypes.bfloat16)
    text = refusal(write_tensors(tmp_path / "in", tiny(), stored))
    for expected in (
        "in: the checkpoint cannot be loaded, and nothing was loaded.",
        "  missing tensor (2): ",
        "    model.norm.weight [64]",
        "    model.layers.5.mlp.experts.3.up_proj.weight [24, 64]",
        "  surplus tensor (1): ",
        "    model.layers.9.mlp.up_proj.weight (model.safetensors)",
        "  misshapen tensor (1): ",
        "    lm_head.weight has shape [64, 160], the config demands [160, 64]",
        "  wrong dtype (2): ",
        "    model.embed_tokens.weight is BF16, expected F32",
        "    model.layers.0.input_layernorm.weight is BF16, expected F32",
        "  wrong router bias (1): ",
        f"    {bias} is BF16, must be F32",
    ):
        assert expected in text, expected


def test_long_lists_are_cut_after_twenty_and_counted(tmp_path: Path) -> None:
    stored = read_tensors(FIXTURE)
    gone = [name for name in stored if ".experts." in name]
    source = write_tensors(
        tmp_path / "in", tiny(), {name: stored[name] for name in stored if name not in gone}
    )
    text = refusal(source)
    assert f"missing tensor ({len(gone)})" in text and f"... and {len(gone) - 20} more" in text
    assert len(text.splitlines()) == 1 + 1 + 20 + 1


def test_another_dtype_than_the_configs_must_be_asked_for(tmp_path: Path) -> None:
    source = write_tensors(tmp_path / "in", tiny(dtype="bfloat16"), read_tensors(FIXTURE))
    text = refusal(source)
    assert "wrong dtype (" in text and "is F32, expected BF16" in text and "pass dtype=" in text
    assert "mlp.gate.weight is" not in text  # the router may be either


def test_a_bf16_bias_is_refused_even_when_converting(tmp_path: Path) -> None:
    stored = read_tensors(FIXTURE)
    stored = {name: array.astype(ml_dtypes.bfloat16) for name, array in stored.items()}
    text = refusal(write_tensors(tmp_path / "in", tiny(), stored), dtype="float32")
    assert "wrong router bias (6)" in text and "wrong dtype" not in text


def test_half_precision_is_refused_even_when_converting(tmp_path: Path) -> None:
    stored = read_tensors(FIXTURE)
    stored["model.norm.weight"] = stored["model.norm.weight"].astype(np.float16)
    text = refusal(write_tensors(tmp_path / "in", tiny(), stored), dtype="bfloat16")
    assert "model.norm.weight is F16, expected BF16 or F32" in text


def test_an_unknown_dtype_is_named() -> None:
    assert "float16" in refusal(FIXTURE, dtype="float16")


# Surplus that is allowed, and layers that are not there.


def test_indexers_on_shared_layers_and_rotary_tables_are_ignored_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = read_tensors(FIXTURE)
    extra = {
        name.replace("layers.2.", f"layers.{layer}."): array
        for name, array in stored.items()
        if "layers.2.self_attn.indexer." in name
        for layer in (3, 7)
    }
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    source = write_tensors(tmp_path / "in", tiny(), stored | extra)
    assert_same(load_hub(source), load_hub(FIXTURE, tiny()))
    assert "ignored 10 indexer tensors of shared layers" in caplog.text
    assert "ignored 1 rotary tables" in caplog.text


def test_a_full_layer_without_indexer_is_named(tmp_path: Path) -> None:
    stored = {
        k: v for k, v in read_tensors(FIXTURE).items() if "layers.6.self_attn.indexer" not in k
    }
    text = refusal(write_tensors(tmp_path / "in", tiny(), stored))
    assert "missing indexer (1): correct indexer_types" in text
    assert "    layer 6 is a full layer" in text and "missing tensor (5)" in text


def test_a_checkpoint_without_the_mtp_layer_says_how_to_load_it(tmp_path: Path) -> None:
    stored = {k: v for k, v in read_tensors(FIXTURE).items() if ".layers.8." not in k}
    source = write_tensors(tmp_path / "in", tiny(), stored)
    text = refusal(source)
    assert "missing MTP layer (1): set num_nextn_predict_layers to 0, or pass mtp=False" in text
    assert "model.layers.8.* is not stored" in text and len(text.splitlines()) == 3
    model = load_hub(source, mtp=False)
    assert model.mtp is None and model.cfg.num_nextn_predict_layers == 0
    assert_same(
        model, load_hub(source, num_nextn_predict_layers=0, index_share_for_mtp_iteration=False)
    )


def test_an_mtp_layer_that_the_config_denies_is_surplus() -> None:
    text = refusal(FIXTURE, tiny(num_nextn_predict_layers=0, index_share_for_mtp_iteration=False))
    assert "surplus tensor (71)" in text and "mtp=False declines an MTP layer" in text


def test_nothing_half_loaded_comes_back_when_reading_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, calls = boxes.LeafBuffers.write, []

    def fails(self, *args):
        calls.append(args)
        if len(calls) > 100:
            raise OSError("the disk is gone")
        write(self, *args)

    monkeypatch.setattr(boxes.LeafBuffers, "write", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        load_hub(FIXTURE)
