"""The `glm-jax bench forward` command, on a model too small to time."""

import json
import sys

import pytest

import glm_jax.bench.forward
from glm_jax.bench.gemm import GemmShape, gemm
from rl.cli import bench as verb
from rl.cli import main as cli

SIZE = ("--config", "tiny", "--batch", "1", "--length", "8", "--repeats", "1")
PEER = """
import json, sys
work = json.loads(sys.argv[1])
assert work["config"]["hidden_size"] == 64 and (work["batch"], work["length"]) == (1, 8)
print(json.dumps({"other": "1"}), flush=True)
for request in sys.stdin:
    print(json.dumps({"wall_s": 1.0, "cpu_s": 1.0}), flush=True)
"""


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    """Makes every dense product a small one: what it takes is of no interest here."""
    monkeypatch.setattr(
        glm_jax.bench.forward, "gemm", lambda shape, dtype: gemm(GemmShape(8, 8, 8), dtype)
    )


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs the command and returns its exit status, output and errors."""

    def run(*args: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["glm-jax", "bench", "forward", *args])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return leaving.value.code, *capsys.readouterr()

    return run


def test_json_has_figures_of_both_dtypes_and_nothing_else_on_stdout(bench, monkeypatch, tmp_path):
    program = tmp_path / "peer.py"
    program.write_text(PEER)
    monkeypatch.setattr(verb, "PEER", program)
    status, out, _ = bench(*SIZE, "--json", "--peer-python", sys.executable)
    figures = json.loads(out)
    assert status == 0
    assert figures["config"]["hidden_size"] == 64
    assert (figures["tokens"], figures["versions"]["other"]) == (8, "1")
    assert figures["device"]["platform"] == "cpu"
    assert list(figures["results"]) == ["float32", "bfloat16"]
    for result in figures["results"].values():
        assert result["tokens_per_s"] > 0 and result["best_gemm_gflops"] > 0
        assert result["peer_tokens_per_s"] == 8.0
        assert result["ratio"]["median"] == result["tokens_per_s"] / 8.0


def test_table_shows_rates_share_and_hardware(bench):
    status, out, _ = bench(*SIZE, "--dtype", "float32")
    assert status == 0
    assert "forward of tiny, 1 x 8 tokens" in out
    for line in ("tokens/s", "share of it", "best dense product", "CPUs; glm-jax"):
        assert line in out
    assert "transformers" not in out and "bfloat16" not in out


def test_a_wrong_option_is_one_error_line_and_status_2(bench):
    status, out, err = bench("--length", "5000")
    assert (status, out) == (2, "")
    assert err == "error: --length 5000: must be 1 to max_position_embeddings = 2048\n"


def test_peer_program_is_part_of_the_project():
    assert verb.PEER.is_file()
