"""The engine: requests in, completions out, by the one forward."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.cache import LatentCache
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from serving.engine import assemble
from serving.engine.pages import PagePool
from serving.engine.program import Programs, Variant
from serving.engine.request import Completion, FinishReason, Sample, check
from serving.engine.sampling_params import SamplingParams
from serving.engine.scheduler import Plan, Scheduler, Span
from serving.engine.text import StopFinder


class Decoder(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, without special tokens."""
        ...


@dataclasses.dataclass
class EngineStats:
    """Sums since the engine was made; times in seconds."""

    n_steps: int = 0
    """Dispatches."""
    n_prefilled: int = 0
    """Prompt tokens computed (again, after preemption)."""
    n_reused: int = 0
    """Tokens whose keys were found in kept pages."""
    n_generated: int = 0
    n_preempted: int = 0
    n_compiled: int = 0
    compile_seconds: float = 0.0
    device_seconds: float = 0.0
    """Waiting for the device."""
    host_seconds: float = 0.0
    """Everything else within a step, compiling apart."""


class Engine:
    """Continuous batching over a paged cache.

    Prompts are read in chunks beside the decoding of others; where all decode, one dispatch draws
    several tokens a sequence. Nothing of this changes a bit of any log-probability.
    """

    def __init__(
        self,
        model: GlmModel,
        *,
        contract: NumericsContract | None = None,
        n_slots: int = 64,
        capacity: int = 1024,
        n_pages: int | None = None,
        n_rows: int = 256,
        n_steps: int = 16,
        tokenizer: Decoder | None = None,
        version: int = 0,
        on_compile: Callable[[str], None] = lambda _: None,
    ):
        """Makes an engine.

        Args:
            model: the weights; held by reference.
            contract: the numerics (default: pinned).
            n_slots: sequences that run at once.
            capacity: tokens a sequence, prompt included; rounded up to whole pages.
            n_pages: pages of the pool (default: room for `n_slots` full sequences).
            n_rows: tokens of a step with prompts; more than `n_slots`.
            n_steps: tokens drawn a sequence in one dispatch.
            tokenizer: for text and stop strings.
            version: of the weights.
            on_compile: called with what was compiled and how long it took.

        Raises:
            GlmError: a size that cannot work.
        """
        self.contract = contract or NumericsContract()
        size = self.contract.key_block
        a_slot = -(-capacity // size)
        n_pages = n_slots * a_slot if n_pages is None else n_pages
        if n_rows <= n_slots:
            raise GlmError(
                f"n_rows: {n_rows} leaves no room for prompts beside n_slots = {n_slots}; raise it"
            )
        if n_steps < 1 or n_pages < a_slot:
            raise GlmError(
                f"n_steps: {n_steps}, n_pages: {n_pages}; need at least one step and {a_slot} "
                f"pages of {size} tokens (one sequence of capacity {capacity})"
            )
        self.cfg, self.tokenizer, self.version = model.cfg, tokenizer, version
        self.programs = Programs(model, on_compile)
        self._leaves = self.programs.leaves_of(model)
        self._cache = LatentCache.empty(
            model.cfg, n_slots, a_slot * size, contract=self.contract, n_pages=n_pages
        )
        self._pool = PagePool(n_pages, size)
        self._scheduler = Scheduler(self._pool, n_slots, n_rows, n_steps)
        self._table = np.full((n_slots, a_slot), -1, np.int32)
        self._requests: dict[int, list[Sample]] = {}
        self._next_request = 0
        self._stats = EngineStats()
        # Few sizes, so that few programs are compiled: whole tiles up to `n_rows`.
        tiles = [tile for tile in self.contract.row_tiles if tile < n_rows]
        tile = tiles[-1] if tiles else self.contract.row_tiles[0]
        self._buckets = (*tiles, -(-n_rows // tile) * tile)

    @property
    def capacity(self) -> int:
        """Tokens a sequence can have."""
        return self._cache.capacity

    @property
    def stats(self) -> EngineStats:
        """A copy of the sums so far."""
        return dataclasses.replace(
            self._stats,
            n_preempted=self._scheduler.n_preempted,
            n_reused=self._scheduler.n_reused,
            n_compiled=self.programs.n_compiled,
            compile_seconds=self.programs.compile_seconds,
        )

    @property
    def busy(self) -> bool:
        """Whether some sample is not done."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[list[Completion]]:
        """Samples every prompt and waits for all: `[prompt][sample]`.

        Raises:
            GlmError: a bad request (nothing runs then), or logits that are not finite; that names
                the prompt and the position. Others are done by then, but not returned.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise GlmError(f"params: {len(each)} for {len(prompts)} prompts; give one a prompt")
        checked = [
            check(
                self.cfg, self.capacity, prompt, p, f"prompt {i}", text=self.tokenizer is not None
            )
            for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))
        ]
        ids = [self._queue(prompt, p) for prompt, p in zip(checked, each, strict=True)]
        done: dict[int, list[Completion]] = {}
        while len(done) < len(ids):
            for request, completions in self.step():
                done[request] = completions
        for i, request in enumerate(ids):
            for completion in done[request]:
                if completion.error:
                    raise GlmError(f"prompt {i}, sample {completion.index}: {completion.error}")
        return [done[request] for request in ids]

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queues a request and returns its number; `step` brings the result.

        Raises:
            GlmError: an empty prompt, an id outside the vocabulary, or what can never fit.
        """
        return self._queue(
            check(
                self.cfg, self.capacity, prompt, params, "prompt", text=self.tokenizer is not None
            ),
            params,
        )

    def cancel(self, request: int) -> list[Completion]:
        """Ends a request; what its samples have so far comes back with the reason `cancelled`.

        Raises:
            GlmError: no such request is open.
        """
        if request not in self._requests:
            raise GlmError(f"request {request}: is not open; it is done, or never was")
        samples = self._requests.pop(request)
        for sample in samples:
            if sample.done is None:
                self._scheduler.remove(sample)
                self._finish(sample, "cancelled")
        return [sample.done for sample in samples if sample.done is not None]

    def set_weights(self, model: GlmModel, version: int) -> None:
        """Takes other weights, by reference.

        Kept pages are forgotten. Running samples go on under the new weights: their keys are
        computed again, and each token bears the version that drew it.

        Raises:
            GlmError: another structure, shape or dtype, named; the old weights stay.
        """
        self._leaves = self.programs.leaves_of(model)
        for sample in reversed(self._scheduler.running):
            self._scheduler.preempt(sample)
        self._pool.forget()
        self.version = version

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Runs one dispatch; returns the requests that it finished."""
        began, waited = time.perf_counter(), self._stats.device_seconds
        compiling = self.programs.compile_seconds
        plan = self._scheduler.plan()
        if plan is None:
            return []
        for span in plan.spans:
            sample = span.sample
            assert sample.slot is not None, "only running samples are planned"
            self._table[sample.slot] = -1
            self._table[sample.slot, : len(sample.pages)] = sample.pages
        self._cache = self._cache.replace(table_Up=jnp.asarray(self._table))
        if plan.n_steps:
            self._decode(plan)
        else:
            self._mixed(plan.spans)
        self._stats.n_steps += 1
        finished = [
            (request, [s.done for s in samples if s.done is not None])
            for request, samples in self._requests.items()
            if all(sample.done is not None for sample in samples)
        ]
        for request, _ in finished:
            del self._requests[request]
        spent = time.perf_counter() - began - (self.programs.compile_seconds - compiling)
        self._stats.host_seconds += spent - (self._stats.device_seconds - waited)
        return finished

    def _check(self, prompt: Sequence[int], params: SamplingParams, name: str) -> np.ndarray:
        text = self.tokenizer is not None
        return check(self.cfg, self.capacity, prompt, params, name, text=text)

    def _queue(self, prompt: np.ndarray, params: SamplingParams) -> int:
        request = self._next_request
        self._next_request += 1
        samples = [
            Sample(request, params.first_sample + i, params, prompt) for i in range(params.n)
        ]
        self._requests[request] = samples
        for sample in samples:
            self._scheduler.add(sample)
        return request

    def _variant(self, samples: Sequence[Sample], prompt: bool = False) -> Variant:
        top = max(s.params.top_logprobs for s in samples)
        return Variant(
            shaped=any(s.params.shaped for s in samples),
            filtered=any(s.params.filtered for s in samples),
            top=0 if top == 0 else 1 << (top - 1).bit_length(),
            prompt=prompt,
        )

    def _bucket(self, n_rows: int) -> int:
        return next(size for size in self._buckets if n_rows <= size)

    def _decode(self, plan: Plan) -> None:
        samples = [span.sample for span in plan.spans]
        decoding = assemble.decoding(samples, self._bucket(len(samples)), self.cfg.vocab_size)
        began, compiling = time.perf_counter(), self.programs.compile_seconds
        self._cache, drawn, counts = self.programs.decode(
            self._variant(samples), plan.n_steps, self._leaves, self._cache, decoding
        )
        drawn, counts = jax.device_get((drawn, counts))
        self._note_device(began, compiling)
        for row, sample in enumerate(samples):
            for i in range(plan.n_steps):
                if not counts[i, row] or sample.done is not None:
                    break
                sample.computed = sample.n_known
                self._take(sample, jax.tree.map(lambda x, i=i, row=row: x[i, row], drawn))

    def _mixed(self, spans: list[Span]) -> None:
        step = assemble.step(spans, self._bucket, self.cfg.vocab_size)
        began, compiling = time.perf_counter(), self.programs.compile_seconds
        self._cache, drawn, prompt_T = self.programs.step(
            self._variant([span.sample for span in spans], step.scores_prompt),
            self._leaves,
            self._cache,
            *step.arrays,
        )
        drawn, prompt_T = jax.device_get((drawn, prompt_T))
        self._note_device(began, compiling)
        at = 0
        for sample, first, last in spans:
            n = min(last, len(sample.prompt) - 1) - first
            if sample.prompt_logprobs is not None and n > 0:
                sample.prompt_logprobs[first : first + n] = prompt_T[at : at + n]
            at += last - first
            sample.computed = last
            if last - first > 1 or not sample.tokens:
                self._stats.n_prefilled += last - first
        for row, sample in enumerate(step.drawing):
            self._take(sample, jax.tree.map(lambda x, row=row: x[row], drawn))

    def _note_device(self, began: float, compiling: float) -> None:
        compiled = self.programs.compile_seconds - compiling
        self._stats.device_seconds += time.perf_counter() - began - compiled

    def _take(self, sample: Sample, drawn: Any) -> None:
        """Adds a token (a row of `Drawn`, on the host) and ends the sample where it should."""
        position = sample.n_known
        if not np.isfinite(drawn.logprob_R) or not np.isfinite(drawn.sampling_logprob_R):
            self._scheduler.remove(sample)
            problem = f"the log-probability at position {position} is not finite; check the weights"
            self._finish(sample, "error", error=problem)
            return
        params = sample.params
        token = int(drawn.token_R)
        sample.tokens.append(token)
        sample.logprobs.append(drawn.logprob_R)
        sample.sampling_logprobs.append(drawn.sampling_logprob_R)
        sample.versions.append(self.version)
        if params.filtered and drawn.kept_RW is not None:
            sample.kept.append(drawn.kept_RW)
        if params.top_logprobs:
            n = params.top_logprobs
            sample.tops.append((drawn.top_ids_Rn[:n], drawn.top_logprobs_Rn[:n]))
        self._stats.n_generated += 1
        enough = len(sample.tokens) >= params.min_tokens
        if (token in params.stop_ids and enough) or self._stop_string(sample):
            self._end(sample, "stop")
        elif sample.n_left == 0:
            self._end(sample, "length")

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        self._scheduler.remove(sample)
        self._finish(sample, reason)

    def _stop_string(self, sample: Sample) -> bool:
        if not sample.params.stop or self.tokenizer is None:
            return False
        return StopFinder(self.tokenizer, sample.params.stop).ends(sample.tokens)

    def _finish(self, sample: Sample, reason: FinishReason, **more: Any) -> None:
        if self.tokenizer is not None:
            finder = StopFinder(self.tokenizer, sample.params.stop)
            more["text"] = finder.text(sample.tokens, sample.params.stop_ids)
        sample.finish(reason, **more)
