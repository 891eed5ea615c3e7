"""The `glm-jax bench` commands, on programs that do nothing."""

import importlib.util
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import glm_jax.bench.decode
import glm_jax.bench.forward
import glm_jax.bench.measure
import glm_jax.bench.score
import glm_jax.bench.train
import serving.bench
from glm_jax.bench.gemm import GemmShape, gemm
from glm_jax.bench.peer import Peer
from glm_jax.bench.program import MODES, Program
from glm_jax.bench.work import Rectangle
from glm_jax.errors import GlmError
from glm_jax.presets import preset
from rl.cli import bench as verb
from rl.cli import main as cli
from serving.engine import EngineStats

SIZE = ("--config", "tiny", "--batch", "1", "--length", "8", "--repeats", "1")
PEER = """
import json, sys
work = json.loads(sys.argv[1])
assert work["config"]["hidden_size"] == 64 and (work["batch"], work["length"]) == (1, 8)
print(json.dumps({"other": "1", "task": work["task"]}), flush=True)
for request in sys.stdin:
    print(json.dumps({"wall_s": 1.0, "cpu_s": 1.0}), flush=True)
"""


def nothing(mode):
    return Program(contract=MODES[mode](), compile_s=1.0, run=lambda: (jnp.zeros(1), None))


class FakeRuns:
    """Runs of an engine that does nothing, a quarter of it on the host."""

    host_share = 0.25

    def __init__(self, bench, n):
        self.engine = self
        self.contract = MODES["pinned"]()
        self.stats = EngineStats(compile_seconds=1.0)

    def __call__(self):
        return jnp.zeros(1), None


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Makes programs that do nothing and small dense products: what they take is of no interest."""
    both = {mode: nothing(mode) for mode in MODES}
    room = glm_jax.bench
    monkeypatch.setattr(room.forward, "programs", lambda *_: {"logits": nothing("native"), **both})
    monkeypatch.setattr(room.score, "scoring_programs", lambda *_: both)
    monkeypatch.setattr(room.train, "programs", lambda *_: both | {"native_remat": both["native"]})
    monkeypatch.setattr(room.decode, "decode_program", lambda b, m, c, n: nothing(c.mode))
    monkeypatch.setattr(
        serving.bench,
        "engine_runs",
        lambda bench, cfg: {n: FakeRuns(bench, n) for n in bench.sequences},
    )
    monkeypatch.setattr(room.decode.GlmModel, "init", lambda cfg: None)
    monkeypatch.setattr(room.measure, "gemm", lambda shape, dtype: gemm(GemmShape(8, 8, 8), dtype))


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs the command and returns its exit status, output and errors."""

    def run(*args: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["glm-jax", "bench", *args])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return leaving.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def peer(monkeypatch, tmp_path):
    """A peer that takes a second for everything."""
    program = tmp_path / "peer.py"
    program.write_text(PEER)
    monkeypatch.setattr(verb, "PEER", program)
    return ("--peer-python", sys.executable)


def test_json_has_figures_of_both_dtypes_and_nothing_else_on_stdout(bench, peer):
    status, out, _ = bench("forward", *SIZE, "--json", *peer)
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


@pytest.mark.parametrize("name", ["score", "train"])
def test_the_peer_is_given_the_task_and_measured_beside_both_modes(name, bench, peer):
    more = ("--micro-batch", "1") if name == "score" else ()
    status, out, _ = bench(name, *SIZE, *more, "--json", "--dtype", "bfloat16", *peer)
    figures = json.loads(out)
    assert status == 0 and figures["versions"]["task"] == name
    result = figures["results"]["bfloat16"]
    assert result["peer"]["tokens_per_s"] == 8.0
    assert (result["pinned"]["mode"], result["native"]["mode"]) == ("pinned", "native")
    for ours in result["comparisons"]:
        speed = result["comparisons"][ours]["peer"]["speed"]["median"]
        assert speed == pytest.approx(result[ours]["tokens_per_s"] / 8.0)


def test_decode_measures_the_sequences_asked_for(bench):
    args = ("--sequences", "2", "--sequences", "5", "--context", "7", "--repeats", "1")
    status, out, _ = bench("decode", "--config", "tiny", *args, "--json")
    figures = json.loads(out)
    assert status == 0 and (figures["sequences"], figures["context"]) == ([2, 5], 7)
    assert list(figures["results"]["float32"]["steps"]) == ["2", "5"]


def test_decode_also_measures_the_engine_beside_the_peer(bench, peer):
    args = ("--sequences", "1", "--prompt", "8", "--new-tokens", "5", "--repeats", "1")
    status, out, _ = bench("decode", "--config", "tiny", *args, "--json", *peer)
    figures = json.loads(out)
    assert status == 0 and (figures["prompt"], figures["new_tokens"]) == (8, 5)
    assert figures["versions"]["task"] == "generate"
    engine = figures["results"]["float32"]["engine"]["1"]
    assert engine["peer"]["tokens_per_s"] == 5.0 and engine["host_share"] == 0.25
    speed = engine["comparisons"]["engine"]["peer"]["speed"]["median"]
    assert speed == pytest.approx(engine["engine"]["tokens_per_s"] / 5.0)
    _, out, _ = bench("decode", "--config", "tiny", *args, "--dtype", "float32", *peer)
    for line in ("1 x, engine, new tokens/s", "host time of a step", "25.0%"):
        assert line in out
    assert "1 x, engine, speed over transformers" in out


def test_table_shows_rates_share_and_hardware(bench):
    status, out, _ = bench("forward", *SIZE, "--dtype", "float32")
    assert status == 0
    assert "forward of tiny, 1 x 8 tokens" in out
    for line in (
        "logits, tokens/s",
        "share of the best dense product",
        "pinned, time over native",
        "CPUs; glm-jax",
    ):
        assert line in out
    assert "transformers" not in out and "bfloat16" not in out


def test_tables_of_the_other_benches_name_what_they_compare(bench, peer):
    _, out, _ = bench("train", *SIZE, "--dtype", "float32", *peer)
    assert "pinned, time over native remat" in out
    assert "native, speed over transformers" in out
    _, out, _ = bench("decode", "--config", "tiny", "--repeats", "1", "--sequences", "3")
    assert "3 x, pinned, tokens/s" in out and "3 x, pinned, time over native" in out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("forward", "--length", "5000"), "--length 5000: must be 1 to max_position_embeddings"),
        (("score", "--micro-batch", "7"), "--micro-batch 7: does not divide --batch 64"),
        (("decode", "--context", "300"), "--context 300: does not fit --capacity 256"),
        (("train", "--repeats", "0"), "--repeats 0: must be at least 1"),
    ],
)
def test_a_wrong_option_is_one_error_line_and_status_2(bench, args, text):
    status, out, err = bench(*args)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {text}") and err.count("\n") == 1


def test_peer_program_is_part_of_the_project_and_knows_every_task():
    spec = importlib.util.spec_from_file_location("bench_transformers", verb.PEER)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert set(program.TASKS) == {"forward", "generate", "score", "train"}


def test_peer_program_refuses_a_task_that_it_does_not_know():
    work = Rectangle(cfg=preset("tiny"), batch=1, length=8).work_of_peer("sing")
    with pytest.raises(GlmError, match="task 'sing' is unknown: use one of forward, generate"):
        Peer(Path(sys.executable), verb.PEER, work)
