"""How fast one decode step is, pinned and native: one new token of each of some sequences."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.batch import TokenBatch
from glm_jax.bench.measure import Measured, Progress, measure
from glm_jax.bench.program import MODES, Program, compiled, flat
from glm_jax.bench.work import Bench
from glm_jax.cache import LatentCache
from glm_jax.checks import check_batch
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.forward import forward
from glm_jax.head import score
from glm_jax.model import GlmModel
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from glm_jax.sizes import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBench(Bench):
    """What is measured."""

    sequences: tuple[int, ...] = (1, 16, 64)
    """Numbers of sequences, each measured by itself."""
    context: int = 200
    """Tokens that the new one attends, itself included."""
    capacity: int = 256
    """Tokens that the cache holds of each sequence."""
    steps: int = 8
    """Steps of one sample; it is their mean."""

    def __post_init__(self):
        super().__post_init__()
        self.require_positive("steps", "context")
        self.require_position("capacity")
        if self.context > self.capacity:
            raise GlmError(
                f"--context {self.context}: does not fit --capacity {self.capacity}; raise that"
            )
        if not self.sequences or min(self.sequences) < 1:
            bad = ", ".join(map(str, self.sequences)) or "none"
            raise GlmError(f"--sequences {bad}: need numbers of at least 1")

    def flops(self, n_sequences: int) -> int:
        """FLOPs of one step, as `Sizes.work` counts them."""
        return n_sequences * Sizes.of(self.cfg).work(self.context - 1, 1).forward


def bench_decode(bench: DecodeBench, *, progress: Progress = lambda step: None) -> dict[str, Any]:
    """Measures both modes at each number of sequences; all take turns in every round."""

    def build(cfg: GlmConfig) -> dict[str, Program]:
        model = GlmModel.init(cfg)
        return {
            f"{mode} {n}": decode_program(bench, model, contract(), n)
            for n in bench.sequences
            for mode, contract in MODES.items()
        }

    return measure(
        bench,
        build,
        lambda measured: {"steps": {str(n): _figures(bench, measured, n) for n in bench.sequences}},
        progress=progress,
        sequences=list(bench.sequences),
        context=bench.context,
        capacity=bench.capacity,
        steps=bench.steps,
        flops={str(n): bench.flops(n) for n in bench.sequences},
    )


def decode_program(
    bench: DecodeBench, model: GlmModel, contract: NumericsContract, n: int
) -> Program:
    """One step of `n` sequences over a cache of random rows; returns the logits `[n, V]`.

    The cache is donated, as an engine does it; every step writes the same rows again.
    """
    cfg, ops = model.cfg, Arithmetic(contract)
    leaves, build = flat(model)
    cache = random_cache(LatentCache.empty(cfg, n, bench.capacity, contract=contract))
    ids_n1 = np.random.default_rng(0).integers(cfg.vocab_size, size=(n, 1))
    batch = TokenBatch.from_sequences(cfg, ids_n1, start=[bench.context - 1] * n)
    batch = batch.padded(ops.bucket(n))
    check_batch(cfg, batch, cache, contract=contract)

    def step(leaves, batch: TokenBatch, cache: LatentCache):
        model = build(leaves)
        out = forward(model, batch, cache)
        scores = score(model, ops, out.hidden_TD, batch.ids_T, batch.n_used, logits=True)
        assert scores.logits_TV is not None
        return scores.logits_TV[:n], (scores, out.cache)

    executable, seconds = compiled(step, leaves, batch, cache, donate=2)
    held = [cache]

    def run():
        logits_nV, (scores, cache) = executable(leaves, batch, held.pop())
        held.append(cache)
        return logits_nV, (scores, cache)

    return Program(contract=contract, compile_s=seconds, run=run, n_runs=bench.steps)


def random_cache(cache: LatentCache) -> LatentCache:
    """The cache with normal rows, as after the norms that its rows come from."""

    def fill(seed: int, store: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), store.shape, jnp.float32).astype(store.dtype)

    return cache.replace(
        latent_LPsC=fill(1, cache.latent_LPsC), index_MPsJ=fill(2, cache.index_MPsJ)
    )


def _figures(bench: DecodeBench, measured: Measured, n: int) -> dict[str, Any]:
    work = {"n_tokens": n, "flops": bench.flops(n)}
    both = {mode: measured.rates(f"{mode} {n}", **work) for mode in MODES}
    versus = measured.versus(f"pinned {n}", f"native {n}")
    return both | {"comparisons": {"pinned": {"native": versus}}}
