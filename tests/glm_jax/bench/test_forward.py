"""The forward benchmark's figures follow from its samples."""

import pytest

import glm_jax.bench.forward as module
from glm_jax.bench import measure
from glm_jax.bench.forward import ForwardBench, bench_forward
from glm_jax.errors import GlmError
from glm_jax.presets import preset
from glm_jax.sizes import Sizes
from tests.glm_jax.bench.fakes import SHAPES, FakePeer, fixed, second_of_gemm

TINY = preset("tiny")
BENCH = ForwardBench(
    cfg=TINY, batch=2, length=5, dtypes=("float32",), repeats=3, gemm_shapes=SHAPES
)


@pytest.fixture
def fixed_times(monkeypatch):
    """Our logits take 2 s and 4 s of CPU, each product 1 s and 1 s of CPU."""

    def programs(bench, cfg):
        return {
            "logits": fixed("native", 2.0, 2.0, 2.0),
            "pinned": fixed("pinned", 2.2, 3.0, 5.0),
            "native": fixed("native", 2.0, 4.0, 5.0),
        }

    monkeypatch.setattr(module, "programs", programs)
    monkeypatch.setattr(measure, "gemm", second_of_gemm)


def test_rates_shares_and_ratios(fixed_times):
    result = bench_forward(BENCH, peer=FakePeer())["results"]["float32"]
    flops = 2 * Sizes.of(TINY).work(0, 5).forward
    assert result["tokens_per_s"] == 10 / 2.0
    assert result["tokens_per_cpu_s"] == 10 / 4.0
    assert result["gflops"] == flops / 2.0 / 1e9
    assert (result["best_gemm"], result["best_gemm_gflops"]) == ("8x8x8", 1024 / 1e9)
    assert result["gemm_share"] == pytest.approx(flops / 2.0 / 1024)
    assert result["gemm_cpu_share"] == pytest.approx(flops / 4.0 / 1024)
    assert result["peer_tokens_per_s"] == 10 / 3.0
    assert result["ratio"] == {"median": 1.5, "min": 0.5, "max": 2.0}
    assert result["cpu_ratio"] == {"median": 0.75, "min": 0.25, "max": 1.0}


def test_pinned_and_native_stand_beside_each_other(fixed_times):
    result = bench_forward(BENCH, peer=FakePeer())["results"]["float32"]
    pinned, native = result["pinned"], result["native"]
    assert (pinned["tokens_per_s"], native["tokens_per_s"]) == (10 / 3.0, 10 / 4.0)
    assert (pinned["mode"], native["mode"]) == ("pinned", "native")
    assert pinned["contract_digest"] != native["contract_digest"]
    assert pinned["compile_s"] == native["compile_s"] == result["compile_s"] == 7.0
    versus = result["comparisons"]["pinned"]["native"]
    assert versus["overhead"] == {"median": 1.0, "min": 0.75, "max": 1.1}
    assert versus["speed"] == {"median": 1.0, "min": 1 / 1.1, "max": 4 / 3}
    assert result["comparisons"]["native"]["peer"]["speed"]["max"] == 1.5


def test_keys_are_the_same_with_and_without_a_peer(fixed_times):
    alone, compared = bench_forward(BENCH), bench_forward(BENCH, peer=FakePeer())
    assert alone.keys() == compared.keys()
    alone_result, compared_result = (x["results"]["float32"] for x in (alone, compared))
    assert alone_result.keys() == compared_result.keys()
    assert alone_result["ratio"] is None and alone_result["peer_tokens_per_s"] is None
    assert alone_result["comparisons"]["pinned"]["peer"] is None
    assert compared["versions"] == alone["versions"] | {"torch": "9"}


def test_progress_names_dtype_and_round(fixed_times):
    steps = []
    bench_forward(BENCH, progress=steps.append)
    rounds = [f"float32: round {i} of 4" for i in (1, 2, 3, 4)]
    assert steps == ["float32: compiling", *rounds]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": 0}, "--batch 0: must be at least 1"),
        ({"repeats": -1}, "--repeats -1: must be at least 1"),
        ({"length": 0}, "--length 0: must be 1 to max_position_embeddings = 1048576"),
        ({"length": 2**20 + 1}, "--length 1048577: must be 1 to"),
        ({"dtypes": ("float16",)}, "--dtype float16: must be one of float32, bfloat16 or both"),
    ],
)
def test_values_out_of_range_are_errors_naming_the_option(change, text):
    with pytest.raises(GlmError, match=text):
        ForwardBench(cfg=TINY, **change)
