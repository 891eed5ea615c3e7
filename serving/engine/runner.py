"""The device side of the engine: weights, cache and the executables that join them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from glm_jax.cache import LatentCache
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract, require_same
from serving.engine import assemble, program
from serving.engine.program import DecodeOutput, MixedOutput
from serving.engine.sample import Sample
from serving.engine.scheduler import Plan, Span
from serving.engine.stats import EngineStats
from serving.engine.weights import Layout, Weights


class Runner:
    """Runs plans; knows nothing of requests."""

    def __init__(
        self,
        model: GlmModel,
        make_cache: Callable[[], LatentCache],
        *,
        n_slots: int,
        n_rows: int,
        n_steps: int,
        on_compile: Callable[[str], None],
    ):
        self.cfg, self.n_steps, self._on_compile = model.cfg, n_steps, on_compile
        self._layout = Layout(model)
        self._programs = program.programs_of(self._layout.structure)
        self._make_cache, self._cache = make_cache, make_cache()
        self.contract: NumericsContract = self._cache.contract
        self._table = np.array(self._cache.table_Up)
        self._step_sizes = _sizes(self.contract.row_tiles, n_rows)
        self._draw_sizes = _sizes(self.contract.row_tiles, n_slots)
        self._widths = _widths(self._table.shape[1])
        self.stats = EngineStats()
        """Times and compilations only."""

    def arrays(self, model: GlmModel, contract: NumericsContract | None = None) -> list[Array]:
        """Arrays of weights of the same layout, for the samples that they are to compute.

        Raises:
            GlmError: another config, structure, shape, dtype or contract, named.
        """
        if contract is not None:
            require_same(self.contract, contract, "weights")
        return self._layout.arrays(model)

    def decode(self, plan: Plan) -> DecodeOutput:
        """Draws up to `plan.n_steps` tokens of each sample; host arrays."""
        samples = self._place(plan.spans)
        n_rows = _fitting(self._draw_sizes, len(samples))
        draws = assemble.draws(samples, n_rows, self.cfg.vocab_size)
        static = (_top(samples), self.n_steps)
        return self._run(program.decode, static, samples, draws, np.int32(plan.n_steps))

    def mixed(self, spans: Sequence[Span]) -> MixedOutput:
        """Computes the spans and draws after those that end with the last known token."""
        samples = self._place(spans)
        n_rows = _fitting(self._step_sizes, sum(span.last - span.first for span in spans))
        n_draws = min(n_rows, self._draw_sizes[-1])
        step = assemble.mixed(spans, n_rows, n_draws, self.cfg.vocab_size)
        return self._run(program.mixed, (_top(samples),), samples, step)

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages that nobody holds."""
        pages_P = np.zeros(self._cache.latent_LPsC.shape[1], bool)
        pages_P[list(pages)] = True
        self._cache = self._executable(program.clear, (), self._cache, pages_P)(
            self._cache, pages_P
        )

    def warm_up(self, weights: Weights) -> None:
        """Compiles the programs of every size."""
        most, vocab_size = self._draw_sizes[-1], self.cfg.vocab_size
        for width in self._widths:
            state = (weights.arrays, self._cache_of(width))
            for n in self._step_sizes:
                step = assemble.mixed([], n, min(n, most), vocab_size)
                self._executable(program.mixed, (0,), *state, step)
            for n in self._draw_sizes:
                draws = assemble.draws([], n, vocab_size)
                self._executable(program.decode, (0, self.n_steps), *state, draws, np.int32(1))

    def _cache_of(self, n_pages: int) -> LatentCache:
        """The cache, with a table of so many pages a slot."""
        return self._cache.replace(table_Up=jnp.asarray(self._table[:, :n_pages]))

    def _place(self, spans: Sequence[Span]) -> list[Sample]:
        """Writes the samples' pages into the table."""
        for sample, _, _ in spans:
            # Native arithmetic reads all of a row: where it has no page, let that be its own.
            self._table[sample.slot] = sample.pages[0]
            self._table[sample.slot, : len(sample.pages)] = sample.pages
        # Keys are scored and selected over the whole table: short sequences need a narrow one.
        longest = max(len(span.sample.pages) for span in spans)
        self._cache = self._cache_of(_fitting(self._widths, longest))
        return [span.sample for span in spans]

    def _run(
        self, function: Any, static: tuple[Any, ...], samples: Sequence[Sample], *args: Any
    ) -> Any:
        """Runs a program over the samples' weights and the cache; its output is on the host."""
        arrays = samples[0].weights.arrays  # a plan has samples of one set of weights
        executable = self._executable(function, static, arrays, self._cache, *args)
        began = time.perf_counter()
        try:
            self._cache, output = executable(arrays, self._cache, *args)
            if not any(sample.params.filtered for sample in samples):
                output = output._replace(drawn=output.drawn._replace(kept_RW=None))
            output = jax.device_get(output)
        except BaseException:
            self._cache = self._make_cache()  # the old one was given away
            raise
        self.stats = self.stats.plus(device_seconds=time.perf_counter() - began)
        return output

    def _executable(self, function: Any, static: tuple[Any, ...], *args: Any) -> Any:
        """The executable for these arguments; making it is counted and told."""
        programs, before = self._programs, self._programs.n_compiled
        seconds = programs.seconds
        executable = programs.compiled(function, static, *args)
        if programs.n_compiled > before:
            seconds = programs.seconds - seconds
            self.stats = self.stats.plus(n_compiled=1, compile_seconds=seconds)
            self._on_compile(f"compiled the engine's {function.__name__} step: {seconds:.1f} s")
        return executable


def _sizes(tiles: Sequence[int], most: int) -> list[int]:
    """Row counts that programs are compiled for: tiles below `most`, and it in whole tiles."""
    sizes = [tile for tile in tiles if tile < most]
    tile = sizes[-1] if sizes else tiles[0]
    return [*sizes, -(-most // tile) * tile]


def _widths(most: int) -> list[int]:
    """Pages a slot that programs are compiled for: `most`, and quarters of it down to 2."""
    widths = [most]
    while widths[0] >= 8:
        widths.insert(0, widths[0] // 4)
    return widths


def _fitting(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if needed <= size)


def _top(samples: Sequence[Sample]) -> int:
    """Most likely ids to compute: a power of two, so that few programs are compiled."""
    most = max(sample.params.top_logprobs for sample in samples)
    return most and 1 << (most - 1).bit_length()
