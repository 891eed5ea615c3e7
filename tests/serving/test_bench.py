"""The engine's benchmark measures what it names."""

import json

import numpy as np
import pytest

import serving.bench
from glm_jax.bench import measure
from glm_jax.errors import GlmError
from glm_jax.presets import preset
from glm_jax.sizes import Sizes
from serving.bench import EngineBench, Runs, bench_engine
from serving.engine import EngineStats
from tests.glm_jax.bench.fakes import SHAPES, FakePeer, fixed, second_of_gemm
from tests.serving.engine.models import CFG, new_engine

TINY = preset("tiny")
OPTIONS = {"cfg": TINY, "dtypes": ("float32",), "repeats": 3, "gemm_shapes": SHAPES}


def test_a_run_generates_as_many_tokens_as_it_says_and_never_the_same_prompts():
    engine = new_engine()
    bench = EngineBench(cfg=CFG, sequences=(3,), prompt=20, new_tokens=7)
    runs = Runs(bench, engine, 3)
    first, second = runs()[0], runs()[0]
    assert first.shape == (3, 7) and not np.array_equal(first, second)
    stats = runs.stats
    assert (stats.n_generated, stats.n_prefilled, stats.n_reused) == (21, 60, 0)
    assert 0 < runs.host_share < 1


def test_figures_are_new_tokens_over_time_and_the_peer_is_asked_for_each_number(monkeypatch):
    class FakeRuns:
        host_share = 0.5

        def __init__(self, n):
            self.engine, self.n = self, n
            self.contract, self.stats = fixed("pinned").contract, EngineStats(compile_seconds=7.0)

    monkeypatch.setattr(measure, "gemm", second_of_gemm)
    monkeypatch.setattr(
        serving.bench, "engine_runs", lambda bench, cfg: {n: FakeRuns(n) for n in bench.sequences}
    )
    times = iter([(2, 3, 4), (4, 6, 8)])
    monkeypatch.setattr(serving.bench, "Program", lambda **_: fixed("pinned", *next(times)))
    asked = []

    class Peer(FakePeer):
        def task(self, dtype, *numbers):
            asked.append(numbers)
            return super().task(dtype, *numbers)

    bench = EngineBench(sequences=(1, 4), prompt=5, new_tokens=6, **OPTIONS)
    report = bench_engine(bench, peer=Peer())
    engine = report["results"]["float32"]["engine"]
    assert asked == [(1,), (4,)] and list(engine) == ["1", "4"]
    assert engine["1"]["engine"]["tokens_per_s"] == 6 / 3
    assert engine["4"]["engine"]["tokens_per_s"] == 24 / 6
    assert engine["4"]["engine"]["gflops"] == 4 * Sizes.of(TINY).work(0, 10).forward / 6 / 1e9
    assert engine["4"]["comparisons"]["engine"]["peer"]["speed"]["median"] == pytest.approx(0.5)
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt": 0}, "--prompt 0: must be at least 1"),
        ({"new_tokens": 0}, "--new-tokens 0: must be at least 1"),
        ({"prompt": 2**20}, "--prompt 1048576: with --new-tokens 96 is more than"),
        ({"sequences": (4, 0)}, "--sequences 4, 0: need numbers of at least 1"),
    ],
)
def test_values_out_of_range_are_errors_naming_the_option(change, text):
    with pytest.raises(GlmError, match=text):
        EngineBench(**{**OPTIONS, **change})
