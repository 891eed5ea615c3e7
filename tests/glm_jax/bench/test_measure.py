"""Figures of programs that are measured in turn."""

import json

import pytest

import glm_jax.bench.decode as decode
import glm_jax.bench.score as score
import glm_jax.bench.train as train
from glm_jax.bench import measure
from glm_jax.bench.decode import DecodeBench, bench_decode
from glm_jax.bench.score import ScoreBench, bench_score
from glm_jax.bench.train import TrainBench, bench_train
from glm_jax.errors import GlmError
from glm_jax.presets import preset
from glm_jax.sizes import Sizes
from tests.glm_jax.bench.fakes import SHAPES, FakePeer, fixed, second_of_gemm

TINY = preset("tiny")
OPTIONS = {"cfg": TINY, "dtypes": ("float32",), "repeats": 3, "gemm_shapes": SHAPES}


@pytest.fixture(autouse=True)
def no_models(monkeypatch):
    """No program is compiled: pinned takes 2, 3, 4 s, native 1, 3, 8 s, recomputing 4 s."""

    def both(*_):
        return {"pinned": fixed("pinned", 2, 3, 4), "native": fixed("native", 1, 3, 8)}

    def decoding(bench, model, contract, n):
        return fixed(contract.mode, *(n * x for x in both()[contract.mode].times[1:]))

    monkeypatch.setattr(score, "scoring_programs", both)
    monkeypatch.setattr(decode, "decode_program", decoding)
    monkeypatch.setattr(
        train, "programs", lambda *_: both() | {"native_remat": fixed("native", 4, 4, 4)}
    )
    monkeypatch.setattr(measure, "gemm", second_of_gemm)
    for module in (score, decode):
        monkeypatch.setattr(module.GlmModel, "init", lambda cfg: None)


def consistent(versus):
    for lead in ("", "cpu_"):
        speed, overhead = versus[f"{lead}speed"], versus[f"{lead}overhead"]
        assert speed["min"] == pytest.approx(1 / overhead["max"])
        assert speed["max"] == pytest.approx(1 / overhead["min"])
        assert speed["median"] == pytest.approx(1 / overhead["median"])
    return True


def test_score_gives_both_modes_and_the_peer():
    report = bench_score(ScoreBench(batch=4, micro_batch=2, length=5, **OPTIONS), peer=FakePeer())
    result = report["results"]["float32"]
    assert (report["tokens"], report["batch"], report["micro_batch"]) == (20, 4, 2)
    assert report["flops"] == 4 * Sizes.of(TINY).work(0, 5).forward
    assert [result[x]["tokens_per_s"] for x in ("pinned", "native", "peer")] == [20 / 3] * 3
    assert result["pinned"]["wall_s"] == {"median": 3, "min": 2, "max": 4}
    assert result["peer"]["cpu_s"] == {"median": 3, "min": 1, "max": 4}
    assert "mode" not in result["peer"]
    versus = result["comparisons"]
    assert versus["pinned"]["native"]["overhead"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert versus["pinned"]["peer"]["speed"] == {"median": 1.0, "min": 1 / 3, "max": 1.5}
    assert all(consistent(x) for others in versus.values() for x in others.values())


def test_train_counts_three_forwards_and_compares_with_both_native_programs():
    report = bench_train(TrainBench(batch=2, length=5, **OPTIONS))
    result = report["results"]["float32"]
    assert report["flops"] == 3 * 2 * Sizes.of(TINY).work(0, 5).forward
    assert result["pinned"]["gflops"] == report["flops"] / 3 / 1e9
    assert [result[x]["mode"] for x in train.PROGRAMS] == ["pinned", "native", "native"]
    versus = result["comparisons"]
    assert versus["pinned"]["native_remat"]["overhead"] == {"median": 0.75, "min": 0.5, "max": 1.0}
    assert consistent(versus["pinned"]["native"])
    assert result["peer"] is None and versus["native"] == {"peer": None}
    json.dumps(report, allow_nan=False)


def test_decode_gives_a_comparison_for_each_number_of_sequences():
    report = bench_decode(DecodeBench(sequences=(1, 4), context=6, capacity=8, **OPTIONS))
    steps = report["results"]["float32"]["steps"]
    assert report["sequences"] == [1, 4] and list(steps) == ["1", "4"]
    assert report["flops"]["4"] == 4 * Sizes.of(TINY).work(5, 1).forward
    for n, step in steps.items():
        assert step["pinned"]["wall_s"]["median"] == 3 * int(n)
        assert step["pinned"]["tokens_per_s"] == 1 / 3
        assert (step["pinned"]["mode"], step["native"]["mode"]) == ("pinned", "native")
        assert consistent(step["comparisons"]["pinned"]["native"])
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("bench", "change", "text"),
    [
        (ScoreBench, {"batch": 8, "micro_batch": 3}, "--micro-batch 3: does not divide --batch 8"),
        (ScoreBench, {"micro_batch": 0}, "--micro-batch 0: must be at least 1"),
        (TrainBench, {"length": 0}, "--length 0: must be 1 to max_position_embeddings"),
        (DecodeBench, {"context": 257}, "--context 257: does not fit --capacity 256"),
        (DecodeBench, {"context": 0}, "--context 0: must be at least 1"),
        (DecodeBench, {"capacity": 2**20 + 1}, "--capacity 1048577: must be 1 to"),
        (DecodeBench, {"sequences": (4, 0)}, "--sequences 4, 0: need numbers of at least 1"),
        (DecodeBench, {"sequences": ()}, "--sequences none: need numbers"),
        (DecodeBench, {"steps": 0}, "--steps 0: must be at least 1"),
    ],
)
def test_values_out_of_range_are_errors_naming_the_option(bench, change, text):
    with pytest.raises(GlmError, match=text):
        bench(cfg=TINY, **change)
