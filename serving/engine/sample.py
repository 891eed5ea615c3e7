"""A sample on its way through the engine."""

import dataclasses

import numpy as np

from serving.engine.pages import page_key
from serving.engine.request import Completion, Event, FinishReason
from serving.engine.sampler import Drawn
from serving.engine.sampling_params import SamplingParams
from serving.engine.text import TextStream
from serving.engine.weights import Weights

NOTHING = {
    "logprobs": np.zeros(0, np.float32),
    "sampling_logprobs": np.zeros(0, np.float32),
    "weight_versions": np.zeros(0, np.int32),
    "stale": np.zeros(0, bool),
}
"""What stands beside no token."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Sample:
    """A sample that waits or runs."""

    request: int
    arrival: int
    """Earlier ones go first."""
    index: int
    params: SamplingParams
    prompt: np.ndarray
    stream: TextStream | None
    weights: Weights
    """What computes it."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    drawn: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)
    """For each step what stands beside its tokens, by field of `Completion`."""
    prompt_logprobs: np.ndarray | None = None
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    """Names of the whole pages of known tokens, as far as they were asked for."""
    computed: int = 0
    """Tokens whose keys are in the cache."""
    stale: bool = False
    """Some of its keys were computed by older weights."""
    emitted: int = 0
    """Characters that events told of."""

    def __post_init__(self):
        if self.params.prompt_logprobs:
            self.prompt_logprobs = np.full(len(self.prompt) - 1, np.nan, np.float32)

    @property
    def place(self) -> int:
        """Its slot; it must run."""
        assert self.slot is not None, "a waiting sample has no slot"
        return self.slot

    @property
    def n_known(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.prompt) + len(self.tokens)

    @property
    def n_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.params.max_tokens - len(self.tokens)

    @property
    def decodes(self) -> bool:
        """Whether only the last known token is still to compute."""
        return self.computed == self.n_known - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are still to come."""
        return self.prompt_logprobs is not None and not self.tokens

    def known(self, first: int, last: int) -> np.ndarray:
        """Ids `first` to `last - 1` of prompt and sampled tokens."""
        n = len(self.prompt)
        if last <= n:
            return self.prompt[first:last]
        tail = np.asarray(self.tokens[max(0, first - n) : last - n], np.int32)
        return np.concatenate([self.prompt[first:n], tail])

    def page_keys(self, n_tokens: int, page_size: int) -> list[bytes]:
        """Names of the whole pages among the first `n_tokens` known tokens."""
        n_pages = n_tokens // page_size
        for j in range(len(self.keys), n_pages):
            before = self.keys[-1] if self.keys else self.weights.root
            self.keys.append(page_key(before, self.known(j * page_size, (j + 1) * page_size)))
        return self.keys[:n_pages]

    def move_to(self, weights: Weights) -> None:
        """Other weights compute it from now on; its pages have other names."""
        self.weights, self.keys = weights, []

    def take(self, drawn: Drawn) -> tuple[FinishReason, str | None] | None:
        """Adds the tokens that a step drew; returns how and why they ended the sample, if they did.

        Args:
            drawn: host arrays of n draws of this sample, `[n, ...]`.
        """
        n = len(drawn.token_R)
        sound = np.isfinite(drawn.logprob_R) & np.isfinite(drawn.sampling_logprob_R)
        problem = None
        if not sound.all():
            n = int(np.argmin(sound))
            problem = (
                f"the log-probability at position {self.n_known + n} is not finite; check the "
                "weights"
            )
        ids = drawn.token_R[:n].tolist()
        params, stopped = self.params, n > 0 and ids[-1] in self.params.stop_ids
        if self.stream is not None:
            ending = self.stream.push(ids[:-1] if stopped else ids)
            if ending is not None:
                ids, n, stopped, problem = ids[:ending], ending, True, None
        self.tokens += ids
        part = {
            "logprobs": drawn.logprob_R[:n],
            "sampling_logprobs": drawn.sampling_logprob_R[:n],
            "weight_versions": np.full(n, self.weights.version, np.int32),
            "stale": np.full(n, self.stale),
        }
        if params.filtered:
            part["kept"] = drawn.kept_RW[:n]
        if params.top_logprobs:
            part["top_ids"] = drawn.top_ids_Rn[:n, : params.top_logprobs]
            part["top_logprobs"] = drawn.top_logprobs_Rn[:n, : params.top_logprobs]
        self.drawn.append(part)
        if problem is not None:
            return "error", problem
        if stopped:
            return "stop", None
        return ("length", None) if self.n_left == 0 else None

    def take_prompt(self, first: int, logprobs: np.ndarray) -> str | None:
        """Notes log-probabilities of tokens `first + 1`, ...; returns what is wrong with them."""
        if self.prompt_logprobs is None or self.tokens:
            return None
        own = self.prompt_logprobs[first : first + len(logprobs)]
        own[:] = logprobs[: len(own)]
        if np.isfinite(own).all():
            return None
        position = first + 1 + int(np.argmin(np.isfinite(own)))
        return f"the log-probability at position {position} is not finite; check the weights"

    def event(self, n_new: int, completion: Completion | None = None) -> Event:
        """What a step did: the last `n_new` tokens, and the end of the sample if it is one."""
        text = None
        if self.stream is not None:
            whole = self.stream.settled if completion is None else self.stream.text
            text, self.emitted = whole[self.emitted :], max(self.emitted, len(whole))
        return Event(
            request=self.request,
            index=self.index,
            token_ids=np.asarray(self.tokens[len(self.tokens) - n_new :], np.int32),
            version=self.weights.version,
            text=text,
            completion=completion,
        )

    def completion(self, reason: FinishReason, error: str | None = None) -> Completion:
        """What there is of it."""
        arrays = NOTHING
        if self.drawn:
            names = self.drawn[0]
            arrays = {name: np.concatenate([part[name] for part in self.drawn]) for name in names}
        return Completion(
            index=self.index,
            token_ids=np.asarray(self.tokens, np.int32),
            finish_reason=reason,
            prompt_logprobs=self.prompt_logprobs,
            text=None if self.stream is None else self.stream.text,
            error=error,
            **arrays,
        )
