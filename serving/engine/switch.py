"""What becomes of running requests when the weights change between two steps."""

from collections.abc import Sequence
from typing import Literal, get_args

from glm_jax.errors import GlmError
from serving.engine.sample import Sample
from serving.engine.scheduler import Scheduler
from serving.engine.weights import Weights

SwitchMode = Literal["finish", "recompute", "continue"]
"""`finish`: a request ends on the weights that it started with, which stay resident until then.
`recompute`: its keys are computed again by the new weights, which then go on. `continue`: the new
weights go on over the old keys; cheapest, but such tokens are marked `stale`, since their
log-probabilities are of no one set of weights (until a preemption recomputes the keys)."""

ResetPromptCache = Literal["all", "new_session", "none"]
"""Kept pages that go: `all` of older weights; `new_session` keeps those of weights that open
requests end on; `none` leaves them until their room is needed. Whatever stays, a page only ever
serves the weights that computed it, as its key names them."""


def check_switch(mode: str, reset_prompt_cache: str) -> None:
    """Raises `GlmError` for an unknown mode."""
    given = {"mode": mode, "reset_prompt_cache": reset_prompt_cache}
    for (name, value), kind in zip(given.items(), (SwitchMode, ResetPromptCache), strict=True):
        if value not in get_args(kind):
            raise GlmError(f"{name}: {value!r} is unknown; give one of {', '.join(get_args(kind))}")


def switch(
    scheduler: Scheduler, requests: Sequence[Sequence[Sample]], weights: Weights, mode: SwitchMode
) -> None:
    """Moves the samples of open requests to other weights, or leaves them on theirs."""
    for samples in requests:
        if mode == "finish" and _started(samples):
            continue
        for sample in samples:
            # What a prompt is scored with must be one set of weights in any mode.
            if sample.slot is not None and (mode != "continue" or sample.scores_prompt):
                scheduler.preempt(sample)
            sample.stale = sample.slot is not None
            sample.move_to(weights)


def _started(samples: Sequence[Sample]) -> bool:
    """Whether a sample of the request runs, has drawn, or has ended already."""
    ended = len(samples) < samples[0].params.n
    return ended or any(s.slot is not None or bool(s.tokens) for s in samples)
