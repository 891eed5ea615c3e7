"""Round trips through the hub's layout, to any sharding and dtype, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from glm_jax.checkpoint import hub_save
from glm_jax.checkpoint.hub import load_hub, save_hub
from glm_jax.checkpoint.hub_layout import hub_tensors
from glm_jax.config import GlmConfig
from glm_jax.config_quantization import Fp8Quantization
from glm_jax.errors import GlmError
from glm_jax.presets import preset
from tests.glm_jax.checkpoint.helpers import (
    FIXTURE,
    arrays_of,
    assert_same,
    random_model,
    read_index,
    read_tensors,
    short,
    tiny,
    write_tensors,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mtp", [0, 1])
def test_a_model_survives_the_round_trip(dtype: str, mtp: int, tmp_path: Path) -> None:
    cfg = tiny(dtype=dtype, num_nextn_predict_layers=mtp, index_share_for_mtp_iteration=False)
    model = random_model(cfg)
    save_hub(model, tmp_path / "out", max_shard_bytes=1e6)
    assert_same(load_hub(tmp_path / "out"), model)


def test_the_round_trip_works_through_the_device_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm_jax.checkpoint.boxes.SMALL_BYTES", 20_000)
    model = random_model(short(dtype="bfloat16"))
    save_hub(model, tmp_path / "out")
    assert_same(load_hub(tmp_path / "out"), model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_gives_back_the_same_bytes(dtype: str, tmp_path: Path) -> None:
    original = {
        name: array if name.endswith("bias") and "gate" in name else array.astype(dtype)
        for name, array in read_tensors(FIXTURE).items()
    }
    cfg = GlmConfig.from_json(FIXTURE).with_overrides(dtype=dtype)
    source = write_tensors(tmp_path / "in", cfg, original)
    save_hub(load_hub(source), tmp_path / "out", max_shard_bytes=5e5)
    exported = read_tensors(tmp_path / "out")
    assert exported.keys() == original.keys()
    for name, array in exported.items():
        assert array.dtype == original[name].dtype, name
        assert array.tobytes() == original[name].tobytes(), name
    assert exported["model.layers.3.mlp.gate.weight"].dtype == dtype
    assert exported["model.layers.3.mlp.gate.e_score_correction_bias"].dtype == np.float32


def test_shards_keep_to_their_limit_and_the_index_tells_where_everything_is(
    tmp_path: Path,
) -> None:
    save_hub(random_model(short()), tmp_path / "out", max_shard_bytes=2e5)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    index = read_index(tmp_path / "out")
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, 1 + len(files))
    ]
    assert len(files) > 2 and sorted(set(index.values())) == files
    assert all((tmp_path / "out" / file).stat().st_size < 2.2e5 for file in files)
    text = (tmp_path / "out" / "model.safetensors.index.json").read_text()
    arrays = read_tensors(tmp_path / "out").values()
    assert json.loads(text)["metadata"]["total_size"] == sum(array.nbytes for array in arrays)
    assert GlmConfig.from_json(tmp_path / "out") == short()


def test_a_trained_router_that_bf16_cannot_hold_is_stored_in_f32(tmp_path: Path) -> None:
    model = random_model(short(dtype="bfloat16"))
    router = model.mtp.block.feed_forward.router
    router.set_value(router.get_value() * 1.001)
    save_hub(model, tmp_path / "out")
    stored = read_tensors(tmp_path / "out")
    assert stored["model.layers.3.mlp.gate.weight"].dtype == np.float32
    assert stored["model.layers.1.mlp.gate.weight"].dtype == ml_dtypes.bfloat16
    assert_same(load_hub(tmp_path / "out"), model)


def scattered(path: str, leaf) -> jax.sharding.NamedSharding:
    """Heads, experts and wide axes over two mesh axes; the rest replicated."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = {"heads": "x", "experts": "x", "vocab": "x", "embed": "y", "mlp": "x", "layers": None}
    axes, used = [], set()
    for name, size in zip(leaf.logical_axes, leaf.shape, strict=True):
        axis = rules.get(name)
        axis = axis if axis not in used and size % 4 == 0 else None
        used.add(axis)
        axes.append(axis)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


@pytest.mark.parametrize("small_bytes", [5_000, 2**20])
def test_a_sharded_load_equals_the_unsharded(
    small_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each device compiles its own updates: a small model, and only its larger leaves go that way.
    sizes = {"num_hidden_layers": 1, "mlp_layer_types": ("sparse",), "indexer_types": ("full",)}
    sizes |= {"num_nextn_predict_layers": 0, "index_share_for_mtp_iteration": False}
    model = random_model(short(**sizes, first_k_dense_replace=0, n_routed_experts=4))
    save_hub(model, tmp_path / "out")
    monkeypatch.setattr("glm_jax.checkpoint.boxes.SMALL_BYTES", small_bytes)
    sharded = load_hub(tmp_path / "out", shardings=scattered)
    arrays = arrays_of(sharded)
    assert len(arrays["embed"].sharding.device_set) == 8
    q_b = arrays["segments.0.blocks.0.attention.q_b"]
    assert q_b.sharding.shard_shape(q_b.shape) == (1, 48, 1, 40)
    assert_same(sharded, model)
    save_hub(sharded, tmp_path / "again")
    ours, theirs = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "again")
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_a_sharding_that_does_not_divide_a_leaf_names_it() -> None:
    def uneven(path, leaf):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        return jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(*["x"] * (path == "mtp.join"))
        )

    with pytest.raises(GlmError, match=r"mtp\.join: .* does not fit \(2, 64, 64\)"):
        load_hub(FIXTURE, shardings=uneven)


def test_a_dtype_converts_matrices_and_leaves_the_router_and_its_bias_alone() -> None:
    plain, converted = load_hub(FIXTURE), load_hub(FIXTURE, dtype="bfloat16")
    assert converted.cfg == plain.cfg.with_overrides(dtype="bfloat16")
    for path, value in arrays_of(converted).items():
        original = arrays_of(plain)[path]
        exact = path.endswith(("router", "router_bias"))
        assert value.dtype == (jnp.float32 if exact else jnp.bfloat16), path
        assert np.array_equal(value, np.asarray(original).astype(value.dtype)), path


def test_config_fields_can_be_overridden() -> None:
    assert load_hub(FIXTURE, latent_norm_eps=1e-6).cfg.latent_norm_eps == 1e-6
    with pytest.raises(GlmError, match="latent_eps"):
        load_hub(FIXTURE, latent_eps=1e-6)


def test_a_given_config_takes_the_place_of_the_file(tmp_path: Path) -> None:
    source = write_tensors(tmp_path / "in", tiny(), read_tensors(FIXTURE))
    (source / "config.json").unlink()
    cfg = GlmConfig.from_json(FIXTURE)
    assert_same(load_hub(source, cfg), load_hub(FIXTURE))


def test_mtp_false_leaves_the_stored_layer_out(caplog: pytest.LogCaptureFixture) -> None:
    model = load_hub(FIXTURE, mtp=False)
    assert model.mtp is None and model.cfg.num_nextn_predict_layers == 0
    assert "ignored 71 MTP tensors" in caplog.text
    whole = arrays_of(load_hub(FIXTURE))
    assert all(np.array_equal(whole[path], value) for path, value in arrays_of(model).items())


def test_the_bar_goes_to_stderr_and_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    load_hub(FIXTURE)
    assert capsys.readouterr() == ("", "")
    load_hub(FIXTURE, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "loading" in err


# Saving.


def test_a_directory_with_something_in_it_is_not_overwritten(tmp_path: Path) -> None:
    model, target = random_model(short()), tmp_path / "out"
    target.mkdir()
    save_hub(model, target)  # an empty directory is fine
    before = read_tensors(target)
    with pytest.raises(GlmError, match=r"out: is not empty; .*overwrite=True"):
        save_hub(random_model(short(), seed=1), target)
    assert all(np.array_equal(before[name], array) for name, array in read_tensors(target).items())
    other = random_model(short(), seed=1)
    save_hub(other, target, overwrite=True)
    assert_same(load_hub(target), other)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_a_checkpoint_is_ever_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(GlmError, match=r"has no config\.json"):
        save_hub(random_model(short()), tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").exists()
    with pytest.raises(GlmError, match=r"thesis\.txt: is a file"):
        save_hub(random_model(short()), tmp_path / "thesis.txt", overwrite=True)


def test_a_save_that_dies_leaves_the_old_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target = random_model(short()), tmp_path / "out"
    save_hub(model, target)
    calls = []

    def dies(arrays, path, **kwargs):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("No space left on device")
        path.write_bytes(b"half")

    monkeypatch.setattr(hub_save, "save_file", dies)
    with pytest.raises(GlmError, match=r"out: cannot be written \(No space left on device\)"):
        save_hub(random_model(short(), seed=1), target, overwrite=True, max_shard_bytes=1e5)
    assert_same(load_hub(target), model)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_save_leaves_behind_is_ignored(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from glm_jax.checkpoint.directories import replace_directory\n"
        "with replace_directory(Path(sys.argv[1]), overwrite=False) as partial:\n"
        "    (partial / 'model-00001-of-00002.safetensors').write_bytes(b'half')\n"
        "    os._exit(9)\n"
    )
    root = Path(__file__).resolve().parents[3]
    target = tmp_path / "out"
    died = subprocess.run([sys.executable, "-c", script, target], cwd=root, check=False)
    assert died.returncode == 9 and not target.exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-") and any(left.iterdir())
    model = random_model(short())
    save_hub(model, target)
    assert_same(load_hub(target), model)


def test_a_model_that_is_not_of_its_config_is_not_saved(tmp_path: Path) -> None:
    model = random_model(short())
    model.final_norm.set_value(model.final_norm.get_value().astype(jnp.bfloat16))
    with pytest.raises(GlmError, match=r"final_norm: is bfloat16 \(64,\), .* float32 \(64,\)"):
        save_hub(model, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_loaded_fp8_config_is_saved_as_plain(tmp_path: Path) -> None:
    quantised = short().with_overrides(quantization_config=Fp8Quantization())
    save_hub(random_model(quantised), tmp_path / "out")
    assert GlmConfig.from_json(tmp_path / "out").quantization_config is None
    assert load_hub(tmp_path / "out", quantised).cfg.quantization_config is None


# Memory.

MEASURE = """
import sys, jax
from glm_jax.checkpoint.hub import load_hub
from glm_jax.params import leaves

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(field + ":"))

jax.numpy.zeros(3).block_until_ready()
open("/proc/self/clear_refs", "w").write("5")  # resets VmHWM to VmRSS
before = status("VmRSS")
sizes = [leaf.get_value().nbytes for _, leaf in leaves(load_hub(sys.argv[1]))]
print(status("VmHWM") - before, sum(sizes), max(sizes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_host_peak_is_below_1_3_of_the_largest_tensor_plus_what_is_loaded(
    tmp_path: Path,
) -> None:
    # VmHWM counts all resident pages: anonymous ones, and those of the mapped file, which the
    # system could take back. On the CPU the loaded arrays are in it too.
    sizes = {"hidden_size": 512, "vocab_size": 110_000, "num_hidden_layers": 1}
    sizes |= {"first_k_dense_replace": 1, "mlp_layer_types": ("dense",), "indexer_types": ("full",)}
    sizes |= {"num_nextn_predict_layers": 0, "index_share_for_mtp_iteration": False}
    cfg = preset("tiny").with_overrides(dtype="bfloat16", **sizes)
    tensors = {t.name: np.ones(t.shape, ml_dtypes.bfloat16) for t in hub_tensors(cfg)}
    source = write_tensors(tmp_path / "in", cfg, tensors)
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", MEASURE, source]
    result = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    peak, loaded, largest = map(int, result.stdout.split())
    assert loaded > 2e8 and largest > 1e8
    assert peak < loaded + 1.3 * largest, (peak - loaded) / largest
