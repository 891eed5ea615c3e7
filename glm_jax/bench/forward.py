"""How fast the stock-XLA forward is: logits of every token of a full rectangle of tokens."""

import dataclasses
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from glm_jax.batch import TokenBatch
from glm_jax.bench.gemm import SHAPES, GemmShape, gemm
from glm_jax.bench.peer import Peer
from glm_jax.bench.timing import (
    Sample,
    Spread,
    Task,
    clocked,
    interleaved,
    median_cpu_s,
    median_wall_s,
)
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.forward import forward
from glm_jax.model import GlmModel
from glm_jax.sizes import Sizes

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardBench:
    """What is measured.

    Raises `GlmError` for a value out of range, with the name of the option.
    """

    cfg: GlmConfig
    batch: int = 8
    """Sequences."""
    length: int = 256
    """Tokens of each."""
    dtypes: tuple[str, ...] = DTYPES
    repeats: int = 5
    gemm_shapes: tuple[GemmShape, ...] = SHAPES

    def __post_init__(self):
        most = self.cfg.max_position_embeddings
        for name, value in (("batch", self.batch), ("repeats", self.repeats)):
            if value < 1:
                raise GlmError(f"--{name} {value}: must be at least 1")
        if not 1 <= self.length <= most:
            raise GlmError(f"--length {self.length}: must be 1 to max_position_embeddings = {most}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise GlmError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)} or both")

    @property
    def n_tokens(self) -> int:
        """Tokens of one forward."""
        return self.batch * self.length

    @property
    def flops(self) -> int:
        """FLOPs of one forward, as `Sizes.work` counts them: what the model asks for."""
        return self.batch * Sizes.of(self.cfg).work(0, self.length).forward

    def work_of_peer(self) -> dict[str, Any]:
        """The same work in words that another implementation understands."""
        return {
            "config": self.cfg.to_hf(),
            "batch": self.batch,
            "length": self.length,
            "threads": n_cpus(),
            "dtypes": list(self.dtypes),
        }


def bench_forward(
    bench: ForwardBench,
    *,
    peer: Peer | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Measures and returns the figures under stable keys; rates are per second.

    Per dtype, each round runs our forward, every dense product, and the peer's forward. A rate is
    work over the median time; `gemm_share` is the forward's FLOP rate over the best dense one's;
    `ratio` and `cpu_ratio` are tokens per second (of time, of CPU) ours over theirs, round by
    round. Figures of an absent peer are null. The load average is that of the start.
    """
    results, measured_on = {}, device()
    for dtype in bench.dtypes:
        tasks = {"ours": forward_task(bench, dtype)}
        tasks |= {str(shape): gemm(shape, dtype) for shape in bench.gemm_shapes}
        if peer is not None:
            tasks["peer"] = peer.task(dtype)

        def show(done: int, of: int, dtype: str = dtype) -> None:
            progress(f"{dtype}: round {done} of {of}")

        results[dtype] = _figures(bench, interleaved(tasks, bench.repeats, progress=show))
    return {
        "config": bench.cfg.to_hf(),
        "tokens": bench.n_tokens,
        "batch": bench.batch,
        "length": bench.length,
        "repeats": bench.repeats,
        "flops": bench.flops,
        "device": measured_on,
        "versions": {name: version(name) for name in ("glm-jax", "jax", "jaxlib", "flax")}
        | (peer.versions if peer is not None else {}),
        "results": results,
    }


def forward_task(bench: ForwardBench, dtype: str) -> Task:
    """A task that runs the jitted forward of a randomly initialised model."""
    cfg = bench.cfg.with_overrides(dtype=dtype)
    ids_BS = np.random.default_rng(0).integers(cfg.vocab_size, size=(bench.batch, bench.length))
    model, batch = GlmModel.init(cfg), TokenBatch.from_sequences(cfg, ids_BS)

    @jax.jit
    def run(model, batch):
        return model.logits(forward(model, batch).hidden_TD)

    return clocked(lambda: run(model, batch))


def _figures(bench: ForwardBench, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    ours, peer = samples["ours"], samples.get("peer")
    gemm_rates = {str(x): x.flops / median_wall_s(samples[str(x)]) / 1e9 for x in bench.gemm_shapes}
    best = max(gemm_rates, key=lambda name: gemm_rates[name])
    gflops = bench.flops / median_wall_s(ours) / 1e9
    figures: dict[str, Any] = {
        "tokens_per_s": bench.n_tokens / median_wall_s(ours),
        "tokens_per_cpu_s": bench.n_tokens / median_cpu_s(ours),
        "wall_s": dataclasses.asdict(Spread.of(x.wall_s for x in ours)),
        "cpu_s": dataclasses.asdict(Spread.of(x.cpu_s for x in ours)),
        "gflops": gflops,
        "best_gemm_gflops": gemm_rates[best],
        "best_gemm": best,
        "gemm_share": gflops / gemm_rates[best],
        "gemm_gflops": gemm_rates,
        "gemm_cpu_share": _gemm_cpu_share(bench, samples),
    }
    if peer is None:
        absent = ("peer_tokens_per_s", "peer_tokens_per_cpu_s", "ratio", "cpu_ratio")
        return figures | dict.fromkeys(absent)
    pairs = list(zip(ours, peer, strict=True))
    return figures | {
        "peer_tokens_per_s": bench.n_tokens / median_wall_s(peer),
        "peer_tokens_per_cpu_s": bench.n_tokens / median_cpu_s(peer),
        "ratio": dataclasses.asdict(Spread.of(b.wall_s / a.wall_s for a, b in pairs)),
        "cpu_ratio": dataclasses.asdict(Spread.of(b.cpu_s / a.cpu_s for a, b in pairs)),
    }


def _gemm_cpu_share(bench: ForwardBench, samples: dict[str, list[Sample]]) -> float:
    """The share of the best dense rate, both per second of CPU."""
    best = max(x.flops / median_cpu_s(samples[str(x)]) for x in bench.gemm_shapes)
    return bench.flops / median_cpu_s(samples["ours"]) / best


def n_cpus() -> int:
    """CPUs this process may use; `taskset` limits them, for us and for a child alike."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device() -> dict[str, Any]:
    """What is measured on, and how many other programs want its CPUs now."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "cpu": _cpu_model(),
        "cpus": n_cpus(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
