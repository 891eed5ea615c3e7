"""How fast the engine generates: prompts read and tokens drawn, as a user calls it."""

import dataclasses
from typing import Any

import numpy as np

from glm_jax.bench.device import n_cpus
from glm_jax.bench.measure import Measured, Progress, measure
from glm_jax.bench.peer import Peer
from glm_jax.bench.program import Program
from glm_jax.bench.work import Bench
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.sizes import Sizes
from serving.engine import Engine, EngineStats, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineBench(Bench):
    """What is measured."""

    sequences: tuple[int, ...] = (1, 16, 64)
    """Numbers of sequences, each measured by itself."""
    prompt: int = 32
    """Tokens of each prompt; no two prompts are the same."""
    new_tokens: int = 96
    """Tokens drawn of each, at temperature 1."""

    def __post_init__(self):
        super().__post_init__()
        self.require_positive("prompt", "new_tokens")
        most = self.cfg.max_position_embeddings
        if self.prompt + self.new_tokens > most:
            raise GlmError(
                f"--prompt {self.prompt}: with --new-tokens {self.new_tokens} is more than "
                f"max_position_embeddings = {most}; lower one"
            )
        if not self.sequences or min(self.sequences) < 1:
            bad = ", ".join(map(str, self.sequences)) or "none"
            raise GlmError(f"--sequences {bad}: need numbers of at least 1")

    def flops(self, n_sequences: int) -> int:
        """FLOPs of one run, as `Sizes.work` counts them; the last token is not computed."""
        n_tokens = self.prompt + self.new_tokens - 1
        return n_sequences * Sizes.of(self.cfg).work(0, n_tokens).forward

    def work_of_peer(self) -> dict[str, Any]:
        """The same work in words that another implementation understands."""
        return {
            "task": "generate",
            "config": self.cfg.to_hf(),
            "batch": max(self.sequences),
            "micro_batch": max(self.sequences),
            "length": self.prompt,
            "new_tokens": self.new_tokens,
            "threads": n_cpus(),
            "dtypes": list(self.dtypes),
        }


class Runs:
    """Runs of one engine at one number of sequences, and what the engine did in them."""

    def __init__(self, bench: EngineBench, engine: Engine, n: int):
        self.bench, self.engine, self.n = bench, engine, n
        self.stats = EngineStats()
        self._draw = np.random.default_rng(n)

    def __call__(self) -> tuple[Any, None]:
        """Log-probabilities of what was generated."""
        shape = (self.n, self.bench.prompt)
        prompts = self._draw.integers(self.bench.cfg.vocab_size, size=shape)
        params = [
            SamplingParams(max_tokens=self.bench.new_tokens, seed=seed) for seed in range(self.n)
        ]
        before = self.engine.stats
        done = self.engine.generate(prompts.tolist(), params)
        # The last run's: the first ones touch pages and compile.
        self.stats = self.engine.stats - before
        return np.stack([completion.logprobs for (completion,) in done]), None

    @property
    def host_share(self) -> float:
        """Share of the engine's steps that is not spent waiting for the device."""
        return self.stats.host_seconds / (self.stats.host_seconds + self.stats.device_seconds)


def engine_runs(bench: EngineBench, cfg: GlmConfig) -> dict[int, Runs]:
    """One engine with room for the most sequences, and its runs."""
    engine = Engine(
        GlmModel.init(cfg),
        n_slots=max(bench.sequences),
        capacity=bench.prompt + bench.new_tokens,
        n_rows=max(256, 4 * max(bench.sequences)),
    )
    engine.warm_up()
    return {n: Runs(bench, engine, n) for n in bench.sequences}


def bench_engine(
    bench: EngineBench, *, peer: Peer | None = None, progress: Progress = lambda step: None
) -> dict[str, Any]:
    """Measures `Engine.generate` at each number of sequences, and the peer beside it."""
    runs: dict[int, Runs] = {}

    def build(cfg: GlmConfig) -> dict[str, Program]:
        runs.update(engine_runs(bench, cfg))
        return {
            f"engine {n}": Program(
                contract=run.engine.contract,
                compile_s=run.engine.stats.compile_seconds,
                run=run,
            )
            for n, run in runs.items()
        }

    def figures(measured: Measured) -> dict[str, Any]:
        return {"engine": {str(n): _figures(bench, measured, n, runs[n]) for n in bench.sequences}}

    return measure(
        bench,
        build,
        figures,
        peer=peer,
        peer_requests={f"peer {n}": (n,) for n in bench.sequences},
        progress=progress,
        sequences=list(bench.sequences),
        prompt=bench.prompt,
        new_tokens=bench.new_tokens,
    )


def _figures(bench: EngineBench, measured: Measured, n: int, runs: Runs) -> dict[str, Any]:
    work = {"n_tokens": n * bench.new_tokens, "flops": bench.flops(n)}
    return {
        "engine": measured.rates(f"engine {n}", **work),
        "peer": measured.rates(f"peer {n}", **work),
        "host_share": runs.host_share,
        "comparisons": {"engine": {"peer": measured.versus(f"engine {n}", f"peer {n}")}},
    }
