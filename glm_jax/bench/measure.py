"""Programs measured in turn, and the figures that follow from the samples."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from glm_jax.bench.device import device
from glm_jax.bench.gemm import gemm
from glm_jax.bench.peer import Peer
from glm_jax.bench.program import Program
from glm_jax.bench.timing import Sample, Spread, interleaved, median_cpu_s, median_wall_s
from glm_jax.bench.work import Bench
from glm_jax.config import GlmConfig

type Progress = Callable[[str], None]
type Programs = Mapping[str, Program]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Samples of one dtype: of every program, of every dense product, and of the peer."""

    bench: Bench
    programs: Programs
    samples: Mapping[str, list[Sample]]

    def gemm(self) -> dict[str, Any]:
        """Rates of the dense products."""
        rates = self._gemm_rates(median_wall_s)
        best = max(rates, key=lambda name: rates[name])
        return {"best_gemm_gflops": rates[best], "best_gemm": best, "gemm_gflops": rates}

    def rates(self, name: str, *, n_tokens: int, flops: int) -> dict[str, Any] | None:
        """What a program (or `peer`) does in a second; None for an absent peer.

        A rate is work over the median time. `gemm_share` is its FLOP rate over the best dense
        product's; the FLOPs are those that the model asks for, so recomputing counts as nothing.
        """
        if name not in self.samples:
            return None
        samples = self.samples[name]
        gflops = flops / median_wall_s(samples) / 1e9
        cpu_gflops = flops / median_cpu_s(samples) / 1e9
        figures = {
            "tokens_per_s": n_tokens / median_wall_s(samples),
            "tokens_per_cpu_s": n_tokens / median_cpu_s(samples),
            "wall_s": _spread(x.wall_s for x in samples),
            "cpu_s": _spread(x.cpu_s for x in samples),
            "gflops": gflops,
            "gemm_share": gflops / max(self._gemm_rates(median_wall_s).values()),
            "gemm_cpu_share": cpu_gflops / max(self._gemm_rates(median_cpu_s).values()),
        }
        if name in self.programs:
            figures |= self.programs[name].to_json()
        return figures

    def versus(self, ours: str, theirs: str) -> dict[str, Any] | None:
        """Two programs round by round; None if one is absent.

        `speed` is their time over ours (above 1: ours is faster), `overhead` ours over theirs
        (1.10: ours takes 10 % longer); `cpu_` the same of CPU seconds.
        """
        if ours not in self.samples or theirs not in self.samples:
            return None
        pairs = list(zip(self.samples[ours], self.samples[theirs], strict=True))
        return {
            "speed": _spread(b.wall_s / a.wall_s for a, b in pairs),
            "cpu_speed": _spread(b.cpu_s / a.cpu_s for a, b in pairs),
            "overhead": _spread(a.wall_s / b.wall_s for a, b in pairs),
            "cpu_overhead": _spread(a.cpu_s / b.cpu_s for a, b in pairs),
        }

    def _gemm_rates(self, median_s: Callable[[list[Sample]], float]) -> dict[str, float]:
        shapes = self.bench.gemm_shapes
        return {str(x): x.flops / median_s(self.samples[str(x)]) / 1e9 for x in shapes}


def measure(
    bench: Bench,
    build: Callable[[GlmConfig], Programs],
    figures: Callable[[Measured], dict[str, Any]],
    *,
    peer: Peer | None = None,
    peer_requests: Mapping[str, Sequence[int]] = MappingProxyType({"peer": ()}),
    progress: Progress = lambda step: None,
    **sizes: Any,
) -> dict[str, Any]:
    """Measures every dtype and returns the report.

    Args:
        bench: what is asked for.
        build: compiles the programs for a config (that of one dtype).
        figures: what to report of a dtype's samples.
        peer: another implementation, measured in the same rounds.
        peer_requests: name of each of its tasks, and the numbers that its request brings.
        progress: called with each step.
        **sizes: further entries of the report.
    """
    # The load average is that of the start, before this program adds to it.
    results, measured_on = {}, device()
    for dtype in bench.dtypes:
        progress(f"{dtype}: compiling")
        programs = build(bench.cfg.with_overrides(dtype=dtype))
        tasks = {name: program.task for name, program in programs.items()}
        tasks |= {str(shape): gemm(shape, dtype) for shape in bench.gemm_shapes}
        if peer is not None:
            tasks |= {name: peer.task(dtype, *asked) for name, asked in peer_requests.items()}

        def show(done: int, of: int, dtype: str = dtype) -> None:
            progress(f"{dtype}: round {done} of {of}")

        samples = interleaved(tasks, bench.repeats, progress=show)
        measured = Measured(bench=bench, programs=programs, samples=samples)
        results[dtype] = figures(measured) | measured.gemm()
    return {
        "config": bench.cfg.to_hf(),
        **sizes,
        "repeats": bench.repeats,
        "device": measured_on,
        "versions": {name: version(name) for name in ("glm-jax", "jax", "jaxlib", "flax")}
        | (peer.versions if peer is not None else {}),
        "results": results,
    }


def comparisons(
    measured: Measured, pairs: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """`versus` of each of ours (key) with each of theirs: `result[ours][theirs]`."""
    return {
        ours: {name: measured.versus(ours, name) for name in theirs}
        for ours, theirs in pairs.items()
    }


def _spread(figures: Iterable[float]) -> dict[str, float]:
    return dataclasses.asdict(Spread.of(figures))
