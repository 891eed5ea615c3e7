"""What goes into the engine and what comes out of it."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

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
    """Sampled ids `[n]`, int32; a stop id that ended the sample is the last."""
    logprobs: np.ndarray
    """Raw log-probabilities `[n]`, f32: at temperature 1, before any filter."""
    sampling_logprobs: np.ndarray
    """Of the distribution that was sampled `[n]`, f32; the same bits where that is the model's."""
    weight_versions: np.ndarray
    """Version of the weights that made each token `[n]`, int32."""
    finish_reason: FinishReason
    stale: np.ndarray | None = None
    """Tokens that were drawn over keys of older weights `[n]`, bool: their log-probabilities are of
    no one set of weights (switch mode `continue` only)."""
    kept: np.ndarray | None = None
    """Ids that could be sampled, as bits `[n, ceil(V / 32)]`, uint32 (see `Shaping`); None: all."""
    top_ids: np.ndarray | None = None
    """Most likely ids `[n, top_logprobs]`, if asked for; descending, ties to the lower id."""
    top_logprobs: np.ndarray | None = None
    """Their raw log-probabilities."""
    prompt_logprobs: np.ndarray | None = None
    """Raw, of prompt tokens 1, 2, ... (the first has none), if asked for."""
    text: str | None = None
    """Whole characters up to a stop string or stop id; None without a tokenizer."""
    error: str | None = None
    """What went wrong, where the reason is `error`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What one step did to one sample."""

    request: int
    index: int
    """Number of the sample."""
    token_ids: np.ndarray
    """New ids, int32."""
    version: int
    """Of the weights that made them: a step is of one set."""
    text: str | None
    """New text; what could begin a stop string or a character waits for the next event."""
    completion: Completion | None
    """The whole sample, where this is its end."""


def check(
    cfg: GlmConfig,
    capacity: int,
    pool_tokens: int,
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
        pool_tokens: tokens that all pages together hold.
        prompt: token ids.
        params: the request's settings.
        name: what errors call the prompt.
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
            f"{name}[{bad[0]}]: token id {ids[bad[0]]} is outside the vocabulary (0 to "
            f"{cfg.vocab_size - 1}); check the tokenizer"
        )
    total = ids.size + params.max_tokens
    if total > capacity:
        raise GlmError(
            f"{name}: {ids.size} tokens and max_tokens = {params.max_tokens} exceed the engine's "
            f"capacity of {capacity}; lower one, or make the engine larger"
        )
    if total > pool_tokens:
        raise GlmError(
            f"{name}: {ids.size} tokens and max_tokens = {params.max_tokens} can never fit in the "
            f"page pool of {pool_tokens} tokens; lower one, or raise the engine's n_pages"
        )
    for i in params.stop_ids:
        if not 0 <= i < cfg.vocab_size:
            raise GlmError(
                f"stop_ids: {i} is outside the vocabulary (0 to {cfg.vocab_size - 1}); remove it"
            )
    if params.min_tokens and len(set(params.stop_ids)) == cfg.vocab_size:
        raise GlmError("stop_ids: every id is one, so min_tokens cannot be reached; remove some")
    for field in ("top_logprobs", "top_k"):
        if (value := getattr(params, field)) > cfg.vocab_size:
            raise GlmError(
                f"{field}: {value} is more than the vocabulary of {cfg.vocab_size}; lower it"
            )
    if params.stop and not text:
        raise GlmError(
            f"stop: {params.stop[0]!r} needs an engine with a tokenizer; give it one, or use "
            "stop_ids"
        )
    return ids.astype(np.int32)
