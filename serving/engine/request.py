"""A sample on its way through the engine, and what is left of it at the end."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from serving.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sample of n tokens."""

    index: int
    """Number of the sample."""
    token_ids: np.ndarray
    """Sampled ids, the stop id that ended it included `[n]`."""
    logprobs: np.ndarray
    """Of the model's own distribution, whatever the temperature and filters `[n]`, f32."""
    sampling_logprobs: np.ndarray
    """Of the distribution that was sampled `[n]`, f32; the same bits where that is the model's."""
    weight_versions: np.ndarray
    """Version of the weights that made each token `[n]`."""
    finish_reason: FinishReason
    kept: np.ndarray | None = None
    """Ids that could be sampled, as bits `[n, ceil(V / 32)]` (see `Shaping`); None: all."""
    top_ids: np.ndarray | None = None
    """Most likely ids `[n, top]`, if asked for, and..."""
    top_logprobs: np.ndarray | None = None
    """...their log-probabilities of the model's own distribution."""
    prompt_logprobs: np.ndarray | None = None
    """Of prompt tokens 1, 2, ... (the first has none), if asked for."""
    text: str | None = None
    """Decoded, without stop string and special tokens; None without a tokenizer."""
    error: str | None = None
    """What went wrong, for the finish reason `error`."""


@dataclasses.dataclass(eq=False)
class Sample:
    """A sample that waits or runs."""

    request: int
    index: int
    params: SamplingParams
    prompt: np.ndarray
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    sampling_logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    kept: list[np.ndarray] = dataclasses.field(default_factory=list)
    tops: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    n_shared: int = 0
    """Leading pages taken from the prefix cache, which are not written."""
    computed: int = 0
    """Tokens whose keys are in the cache."""
    done: Completion | None = None

    def __post_init__(self):
        if self.params.prompt_logprobs:
            self.prompt_logprobs = np.full(len(self.prompt) - 1, np.nan, np.float32)

    @property
    def n_known(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.prompt) + len(self.tokens)

    @property
    def n_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.params.max_tokens - len(self.tokens)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether prompt tokens are still to be scored."""
        scores = self.prompt_logprobs
        return scores is not None and bool(np.isnan(scores).any())

    def known(self, first: int, last: int) -> np.ndarray:
        """Ids `first` to `last - 1` of prompt and sampled tokens."""
        n = len(self.prompt)
        if last <= n:
            return self.prompt[first:last]
        tail = np.asarray(self.tokens[max(0, first - n) : last - n], np.int32)
        return np.concatenate([self.prompt[first:n], tail])

    def finish(self, reason: FinishReason, **more: Any) -> None:
        """Makes the completion."""
        wants_kept = self.params.filtered and len(self.kept) == len(self.tokens) > 0
        tops = list(zip(*self.tops, strict=True)) if self.tops else (None, None)
        self.done = Completion(
            index=self.index,
            token_ids=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            sampling_logprobs=np.asarray(self.sampling_logprobs, np.float32),
            weight_versions=np.asarray(self.versions, np.int32),
            finish_reason=reason,
            kept=np.stack(self.kept) if wants_kept else None,
            top_ids=None if tops[0] is None else np.stack(tops[0]),
            top_logprobs=None if tops[1] is None else np.stack(tops[1]),
            prompt_logprobs=self.prompt_logprobs,
            **more,
        )


def check(
    cfg: GlmConfig,
    capacity: int,
    prompt: Sequence[int],
    params: SamplingParams,
    name: str,
    *,
    text: bool,
) -> np.ndarray:
    """The prompt as an array `[n]`, int32, if the request can run.

    Args:
        cfg: the model's config.
        capacity: tokens a sequence can have.
        prompt: token ids.
        params: the request's settings.
        name: what errors call it.
        text: whether the engine has a tokenizer.

    Raises:
        GlmError: an empty prompt, an id outside the vocabulary, or what can never fit.
    """
    ids = np.asarray(prompt)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise GlmError(f"{name}: {prompt!r:.60} is no list of token ids; give at least one")
    bad = np.flatnonzero((ids < 0) | (ids >= cfg.vocab_size))
    if bad.size:
        raise GlmError(
            f"{name}: id {ids[bad[0]]} at index {bad[0]} is outside the vocabulary, 0 to "
            f"{cfg.vocab_size - 1}"
        )
    if ids.size + params.max_tokens > capacity:
        raise GlmError(
            f"{name}: {ids.size} tokens and max_tokens = {params.max_tokens} exceed the engine's "
            f"capacity of {capacity}; lower one, or make the engine larger"
        )
    if outside := [i for i in params.stop_ids if not 0 <= i < cfg.vocab_size]:
        raise GlmError(
            f"stop_ids: {outside[0]} is outside the vocabulary, 0 to {cfg.vocab_size - 1}"
        )
    for field in ("top_logprobs", "top_k"):
        if (value := getattr(params, field)) > cfg.vocab_size:
            raise GlmError(f"{field}: {value} is more than the vocabulary, {cfg.vocab_size}")
    if params.stop and not text:
        raise GlmError("stop: stop strings need an engine with a tokenizer; use stop_ids")
    return ids.astype(np.int32)
