"""The engine: requests in, completions out, by the one forward."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from glm_jax.cache import LatentCache
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from serving.engine.pages import PagePool, root_key
from serving.engine.request import Completion, Event, FinishReason, check
from serving.engine.runner import Runner
from serving.engine.sample import Sample
from serving.engine.sampling_params import SamplingParams
from serving.engine.scheduler import Plan, Scheduler, Span
from serving.engine.stats import EngineStats
from serving.engine.switch import ResetPromptCache, SwitchMode, check_switch, switch
from serving.engine.text import Decoder, TextStream
from serving.engine.weights import Weights


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
            contract: the numerics (default: pinned). Its `key_block` is the page size.
            n_slots: sequences that run at once.
            capacity: tokens a sequence, prompt included.
            n_pages: pages of the pool (default: room for `n_slots` full sequences).
            n_rows: tokens of a step with prompts; more than `n_slots`.
            n_steps: most tokens drawn a sequence in one dispatch.
            tokenizer: for text and stop strings.
            version: of the weights.
            on_compile: told of each program that had to be compiled.

        Raises:
            GlmError: a size that cannot work.
        """
        contract = contract or NumericsContract()
        if n_rows <= n_slots:
            raise GlmError(
                f"n_rows: {n_rows} leaves no room for prompts beside n_slots = {n_slots}; raise it"
            )
        if n_steps < 1:
            raise GlmError(f"n_steps: {n_steps}; must be at least 1")
        if n_pages is None:
            n_pages = n_slots * -(-capacity // contract.key_block)
        self.cfg, self.contract, self.capacity = model.cfg, contract, capacity
        self._n_weights = 0
        self.tokenizer = tokenizer
        self._runner = Runner(
            model,
            lambda: LatentCache.empty(
                model.cfg, n_slots, capacity, contract=contract, n_pages=n_pages
            ),
            n_slots=n_slots,
            n_rows=n_rows,
            n_steps=n_steps,
            on_compile=on_compile,
        )
        self._weights = self._weights_of(self._runner.arrays(model), version, "")
        pool = PagePool(n_pages, contract.key_block)
        self._scheduler = Scheduler(pool, n_slots=n_slots, n_rows=n_rows, n_steps=n_steps)
        self._requests: dict[int, list[Sample]] = {}
        self._untold: list[Event] = []
        self._n_requests = self._n_samples = 0
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        """The sums so far."""
        scheduler, times = self._scheduler, self._runner.stats
        return self._stats.plus(
            n_preempted=scheduler.n_preempted,
            n_reused=scheduler.n_reused,
            n_compiled=times.n_compiled,
            compile_seconds=times.compile_seconds,
            device_seconds=times.device_seconds,
        )

    @property
    def version(self) -> int:
        """Of the weights that new requests run on."""
        return self._weights.version

    @property
    def versions(self) -> list[int]:
        """Of all weights that are resident: the newest, and those that open requests end on."""
        samples = [sample for samples in self._requests.values() for sample in samples]
        return sorted(w.version for w in {self._weights, *(s.weights for s in samples)})

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._requests or self._untold)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[list[Completion]]:
        """Samples every prompt and waits for all: `[prompt][sample]`.

        Requests that were submitted before run on beside them; `step` tells of them afterwards.

        Raises:
            GlmError: a bad request (nothing runs then), or a log-probability that is not finite,
                with the number of the prompt and the position; all others are done by then.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise GlmError(f"params: {len(each)} for {len(prompts)} prompts; give one a prompt")
        pairs = list(zip(prompts, each, strict=True))
        checked = [self._check(prompt, p, f"prompt {i}") for i, (prompt, p) in enumerate(pairs)]
        numbers = [self._queue(prompt, p) for prompt, p in zip(checked, each, strict=True)]
        open_requests, done = set(numbers), {number: [] for number in numbers}
        try:
            while open_requests:
                for event in self._step():
                    if event.request not in done:
                        self._untold.append(event)
                    elif event.completion is not None:
                        done[event.request].append(event.completion)
                open_requests &= self._requests.keys()
        finally:
            for number in open_requests & self._requests.keys():
                self.cancel(number)
        for i, number in enumerate(numbers):
            done[number].sort(key=lambda completion: completion.index)
            for completion in done[number]:
                if completion.error is not None:
                    raise GlmError(f"prompt {i}, sample {completion.index}: {completion.error}")
        return [done[number] for number in numbers]

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queues a request and returns its number; events of `step` bear it.

        Raises:
            GlmError: an empty prompt, an id outside the vocabulary, or what can never fit.
        """
        return self._queue(self._check(prompt, params, "prompt"), params)

    def cancel(self, request: int) -> list[Completion]:
        """Ends a request; what its unfinished samples have so far comes back, and in no event.

        Raises:
            GlmError: no such request is open.
        """
        if request not in self._requests:
            raise GlmError(
                f"request {request}: is not open (done, cancelled, or never submitted); give one "
                f"of {sorted(self._requests)}"
            )
        samples = self._requests.pop(request)
        for sample in samples:
            self._scheduler.remove(sample)
        return [sample.completion("cancelled") for sample in samples]

    def set_weights(
        self,
        model: GlmModel,
        version: int,
        *,
        contract: NumericsContract | None = None,
        mode: SwitchMode = "recompute",
        reset_prompt_cache: ResetPromptCache = "all",
        identity: str = "",
    ) -> None:
        """Takes other weights between two steps: by reference, or from other devices by a copy.

        What samples have drawn stays, and each token bears the version of the weights that drew it.

        Args:
            model: the weights.
            version: their number.
            contract: numerics that they were made for, if the engine's must be the same.
            mode: what becomes of requests that run (see `SwitchMode`).
            reset_prompt_cache: which kept pages go (see `ResetPromptCache`).
            identity: names these weights and no others; with it, pages that `reset_prompt_cache`
                left serve again when the same weights come back.

        Raises:
            GlmError: another config, structure, shape, dtype or contract, named, or an unknown
                mode; the old weights stay.
        """
        check_switch(mode, reset_prompt_cache)
        arrays = self._runner.arrays(model, contract)
        self._weights = self._weights_of(arrays, version, identity)
        switch(self._scheduler, list(self._requests.values()), self._weights, mode)
        in_use = {s.weights.root for samples in self._requests.values() for s in samples}
        if reset_prompt_cache == "all":
            self._scheduler.pool.forget(but={self._weights.root} if identity else ())
        elif reset_prompt_cache == "new_session":
            self._scheduler.pool.forget(but={self._weights.root, *in_use})

    def warm_up(self) -> None:
        """Compiles all programs that requests need, unless they ask for `top_logprobs`."""
        self._runner.warm_up(self._weights)

    def step(self) -> list[Event]:
        """Runs one dispatch; returns what it did to each sample it moved."""
        untold, self._untold = self._untold, []
        return untold + self._step()

    def _step(self) -> list[Event]:
        began, before = time.perf_counter(), self._runner.stats
        plan = self._scheduler.plan()
        if plan is None:
            return []
        try:
            events = self._decode(plan) if plan.n_steps else self._mixed(plan.spans)
        except BaseException:
            self._scheduler.restart()  # what the cache held is lost
            raise
        since = self._runner.stats - before
        spent = time.perf_counter() - began - since.device_seconds - since.compile_seconds
        self._stats = self._stats.plus(n_steps=1, host_seconds=spent)
        return events

    def _weights_of(self, arrays: list[Array], version: int, identity: str) -> Weights:
        """Without an identity, weights are taken for others than all before."""
        self._n_weights += 1
        name = f"name {identity}" if identity else f"number {self._n_weights}"
        root = root_key(version, self.contract.digest, identity=name)
        return Weights(arrays, version, root)

    def _check(self, prompt: Sequence[int], params: SamplingParams, name: str) -> np.ndarray:
        pool, text = self._scheduler.pool, self.tokenizer is not None
        sizes = (self.capacity, pool.n_pages * pool.page_size)
        return check(self.cfg, *sizes, prompt, params, name, text=text)

    def _queue(self, prompt: np.ndarray, params: SamplingParams) -> int:
        number = self._n_requests
        self._n_requests += 1
        self._requests[number] = [
            Sample(
                request=number,
                arrival=self._n_samples + i,
                index=params.first_sample + i,
                params=params,
                prompt=prompt,
                weights=self._weights,
                stream=None if self.tokenizer is None else TextStream(self.tokenizer, params.stop),
            )
            for i in range(params.n)
        ]
        self._n_samples += params.n
        for sample in self._requests[number]:
            self._scheduler.add(sample)
        return number

    def _decode(self, plan: Plan) -> list[Event]:
        output = self._runner.decode(plan)
        n_R = output.counts_nR.sum(axis=0)
        return [
            self._take(
                span.sample, jax.tree.map(lambda x, row=row: x[: n_R[row], row], output.drawn)
            )
            for row, span in enumerate(plan.spans)
        ]

    def _mixed(self, spans: Sequence[Span]) -> list[Event]:
        output = self._runner.mixed(spans)
        prompt_T = np.asarray(output.prompt_T)
        events, at, row = [], 0, 0
        for span in spans:
            sample, n_tokens = span.sample, span.last - span.first
            problem = sample.take_prompt(span.first, prompt_T[at : at + n_tokens])
            at += n_tokens
            if not (sample.tokens and sample.decodes):
                self._stats = self._stats.plus(n_prefilled=n_tokens)
            drawn = jax.tree.map(lambda x, row=row: x[row : row + 1], output.drawn)
            draws = span.draws
            row += draws
            if problem is not None:
                events.append(self._end(sample, 0, "error", problem))
            elif draws:
                events.append(self._take(sample, drawn))
            else:
                self._scheduler.computed(sample, span.last)
        return events

    def _take(self, sample: Sample, drawn: Any) -> Event:
        """Adds what was drawn (host arrays `[n, ...]`) to a sample, and ends it where it should."""
        before = len(sample.tokens)
        ending = sample.take(drawn)
        n_new = len(sample.tokens) - before
        self._stats = self._stats.plus(n_generated=n_new)
        if ending is not None:
            return self._end(sample, n_new, *ending)
        self._scheduler.computed(sample, sample.n_known - 1)
        return sample.event(n_new)

    def _end(
        self, sample: Sample, n_new: int, reason: FinishReason, problem: str | None = None
    ) -> Event:
        scheduler, request = self._scheduler, self._requests[sample.request]
        if problem is None:
            scheduler.computed(sample, sample.n_known - 1)
        pages = scheduler.remove(sample)
        if problem is not None:
            self._runner.clear(scheduler.pool.discard(pages))
        request.remove(sample)
        if not request:
            del self._requests[sample.request]
        return sample.event(n_new, sample.completion(reason, problem))
