"""The `glm-jax info` command."""

import json
import subprocess
import sys

import pytest

from glm_jax.model.layout import SegmentLayout, segments
from glm_jax.presets import PRESETS, preset
from rl.cli import main as cli
from rl.cli.info_text import layer_pattern, scaled

PROGRAM = """
import resource, sys
import glm_jax.sizes, rich.console, rl.cli.main
import jax
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sys.argv = ["glm-jax", "info", "glm-5.2", "--tree"]
try:
    rl.cli.main.main()
finally:
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    from jax._src import xla_bridge
    print(after - before, xla_bridge.backends_are_initialized(), file=sys.stderr)
"""


@pytest.fixture
def info(monkeypatch, capsys):
    """Runs the command and returns its exit status, output and errors."""

    def run(*args: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["glm-jax", "info", *args])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return leaving.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def figures(info):
    """Runs the command with --json and returns what it printed."""

    def run(*args: str) -> dict:
        status, out, err = info(*args, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("flags", [(), ("--tree",)])
def test_text_fits_100_columns(info, name, flags):
    status, out, _ = info(name, *flags)
    assert status == 0
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
    assert "…" not in out


def test_text_shows_the_figures_of_glm_5_2(info):
    _, out, _ = info("glm-5.2")
    for text in (
        "(dense,full) ×3 · (sparse,shared) ×3 · [(sparse,full) · (sparse,shared) ×3] ×18",
        "743,377,000,704",
        "753,329,921,024",
        "40.30 billion",
        "95,232 B",
        "53,940 B",
        "131,072 tokens",
        "1,048,576 tokens",
        "125.39 GFLOP",
        "segments.2.blocks.1–3",
    ):
        assert text in out


def test_tree_lists_every_parameter_with_its_shape_axes_and_bytes(info, figures):
    _, out, _ = info("tiny", "--tree")
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    for x in figures("tiny")["tensors"]:
        shape = "×".join(map(str, x["shape"]))
        leaf = x["name"].split(".")[-1]
        wanted = f"{leaf} {shape} f32 {' '.join(x['axes'])} {scaled(x['bytes'], 'B')}"
        assert any(line.endswith(wanted) for line in lines), wanted


def test_json_has_stable_keys(figures):
    found = figures("glm-5.2")
    assert list(found) == [
        "model", "config", "segments", "parameters", "weight_bytes", "cache", "flops", "tensors",
    ]  # fmt: skip
    assert list(found["parameters"]) == [
        "parts", "main", "mtp", "stored", "active_per_token", "router_bias_buffers",
    ]  # fmt: skip
    assert all(
        list(x) == ["name", "per_unit", "units", "total"] for x in found["parameters"]["parts"]
    )
    assert list(found["cache"]) == ["context", "max_context", "model", "fp8"]
    assert list(found["cache"]["model"]) == list(found["cache"]["fp8"])
    assert list(found["flops"]) == [
        "context", "decode_token", "prefill", "prefill_mean_token",
    ]  # fmt: skip
    for work in ("decode_token", "prefill", "prefill_mean_token"):
        assert list(found["flops"][work]) == [
            "projections", "absorption", "attention", "indexer", "forward", "training",
        ]  # fmt: skip
    assert list(found["tensors"][0]) == [
        "name", "shape", "dtype", "axes", "trained", "part", "elements", "bytes",
    ]  # fmt: skip


def test_json_figures_agree_with_each_other(figures):
    found = figures("glm-5.2", "--context", "4096")
    tensors = found["tensors"]
    trained = sum(x["elements"] for x in tensors if x["trained"])
    assert trained == found["parameters"]["stored"] == 753_329_921_024
    assert sum(x["bytes"] for x in tensors) == found["weight_bytes"]["total"]
    assert found["cache"]["model"]["bytes_per_token"] == 95_232
    assert found["cache"]["model"]["bytes_at_context"] == 95_232 * 4096
    assert found["cache"]["fp8"]["bytes_at_max_context"] == 53_940 * 1_048_576
    assert found["flops"]["context"] == 4096
    assert found["flops"]["decode_token"]["indexer"] == 21 * 8_192 * 4096
    mean, whole = found["flops"]["prefill_mean_token"], found["flops"]["prefill"]
    assert mean["attention"] == (78 * 139_264 * (2048 * 2049 // 2 + 2048 * 2048)) // 4096
    assert mean["forward"] == whole["forward"] // 4096
    assert [x["repeats"] for x in found["segments"]] == [3, 3, 18]


def test_default_context_is_the_models_maximum_where_that_is_shorter(figures):
    assert figures("small")["flops"]["context"] == 2048
    assert figures("glm-5")["flops"]["context"] == 131_072


def test_a_checkpoints_directory_or_config_gives_the_same_figures(figures, tmp_path):
    file = preset("glm-5.2").save_json(tmp_path)
    by_name = figures("glm-5.2")
    for path in (tmp_path, file):
        assert figures(str(path)) | {"model": "glm-5.2"} == by_name


@pytest.mark.parametrize(
    "args, shown",
    [
        (["glm-5.3"], "did you mean 'glm-5"),
        (["smal"], "did you mean 'small'"),
        (["no/such/place"], "no/such/place: no such file or directory"),
        (["glm-5.2", "--context", "1048577"], "context = 1048577: must be 1 to"),
        (["glm-5.2", "--context", "0"], "context = 0: must be 1 to"),
        (["glm-5.2", "--context", "-7"], "context = -7: must be 1 to"),
    ],
)
def test_users_mistakes_are_one_line_and_status_2(info, args, shown):
    status, out, err = info(*args)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and shown in err


def test_glm_5_2_takes_no_memory_and_no_device():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert "743,377,000,704" in done.stdout
    growth_kib, device_in_use = done.stderr.split()[-2:]
    assert int(growth_kib) < 64 * 1024
    assert device_in_use == "False"


def test_pattern_counts_equal_layers_and_repeats():
    layers = segments(preset("tiny").layer_kinds)
    assert layer_pattern(layers).startswith("(dense,full) ×3 · (sparse,shared) ×3")
    once = SegmentLayout((("dense", "full"), ("sparse", "full"), ("sparse", "full")), 1, 0)
    assert layer_pattern([once]) == "(dense,full) · (sparse,full) ×2"


@pytest.mark.parametrize(
    "n, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (95_232, "95.23 kB"), (999_999, "1.00 MB")],
)
def test_units_are_decimal(n, text):
    assert scaled(n, "B") == text
