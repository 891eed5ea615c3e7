"""A sampling client in this process: the Tinker client's methods over an engine."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from serving.engine import Engine, SamplingParams


@dataclasses.dataclass(frozen=True)
class SampledSequence:
    """One sample."""

    tokens: list[int]
    """Sampled ids, the stop id that ended it included."""
    logprobs: list[float]
    """Of the distribution that was sampled."""
    stop_reason: str
    """`stop` or `length`."""


@dataclasses.dataclass(frozen=True)
class SampleResponse:
    """Samples of one prompt."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """Of each prompt token, None for the first; if asked for."""


class SamplingClient:
    """Samples and scores under the engine's weights.

    Every call returns a future, as the client over HTTP does; here it is done when returned.
    """

    def __init__(self, engine: Engine):
        self._engine = engine

    def sample(
        self,
        prompt: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> "Future[SampleResponse]":
        """Samples a prompt.

        Args:
            prompt: token ids.
            num_samples: in place of `sampling_params.n`.
            sampling_params: how; the same ones give the same samples under the same weights.
            include_prompt_logprobs: score the prompt too.

        Raises:
            GlmError: from the future: a request that cannot run.
        """
        return _done(self._sample, prompt, num_samples, sampling_params, include_prompt_logprobs)

    def compute_logprobs(self, prompt: Sequence[int]) -> "Future[list[float | None]]":
        """Log-probability of each prompt token given those before it; None for the first."""
        return _done(self._score, prompt)

    def _sample(self, prompt, num_samples, sampling_params, include_prompt_logprobs):
        params = dataclasses.replace(
            sampling_params, n=num_samples, prompt_logprobs=include_prompt_logprobs
        )
        completions = self._engine.generate([prompt], params)[0]
        sequences = [
            SampledSequence(c.token_ids.tolist(), c.sampling_logprobs.tolist(), c.finish_reason)
            for c in completions
        ]
        scores = completions[0].prompt_logprobs
        return SampleResponse(sequences, None if scores is None else _with_first(scores))

    def _score(self, prompt):
        # An engine samples after every prompt: one token is drawn, and dropped.
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True)
        scores = self._engine.generate([prompt], params)[0][0].prompt_logprobs
        assert scores is not None, "asked for"
        return _with_first(scores)


def _with_first(scores: np.ndarray) -> list[float | None]:
    return [None, *scores.tolist()]


def _done(call, *args):
    future = Future()
    try:
        future.set_result(call(*args))
    except Exception as error:
        future.set_exception(error)
    return future
