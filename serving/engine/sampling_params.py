"""How a request is sampled."""

import dataclasses
import math
import operator
from typing import Any

from glm_jax.errors import GlmError

WHOLE = {  # field -> least value
    "max_tokens": 1,
    "min_tokens": 0,
    "top_k": 0,
    "seed": 0,
    "n": 1,
    "first_sample": 0,
    "top_logprobs": 0,
}
LARGEST = 2**31 - 1
LARGEST_SEED = 2**32 - 1
MOST_SAMPLES = 2**16
COLDEST = 1e-3
"""Least temperature: below it logits / temperature overflows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request.

    The distribution is softmax(logits / temperature) restricted to the kept ids. A token is a
    function of the request alone: its randomness is keyed by (seed, number of the sample, position
    of the token). Two prompts of one seed share their noise: give each prompt a seed of its own
    where draws should be independent.

    Ids are kept by these rules, one after the other:

    1. Stop ids are dropped while fewer than `min_tokens` tokens are sampled.
    2. `top_k`: the k most likely of the rest; of equals the lower ids.
    3. `top_p`: an id stays if the ids that are strictly more likely than it hold less than `top_p`
       of what rule 2 left. So the most likely id always stays, and equals stay or go together.
    4. `min_p`: an id stays if it is at least `min_p` times as likely as the most likely one.

    Raises:
        GlmError: a value that cannot be meant; the text names the field, the value and the remedy.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    """0: the most likely id is taken, ties to the lowest. A greedy choice has no distribution: its
    sampling log-probability is the raw one, and nothing is recorded as kept."""
    top_p: float = 1.0
    """1 keeps all."""
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    """0 keeps all."""
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    """A sampled one ends the sample and is its last token."""
    stop: tuple[str, ...] = ()
    """Strings that end the text and are no part of it (the engine needs a tokenizer)."""
    n: int = 1
    """Samples of the prompt. Sample i is the same whatever `n` is."""
    first_sample: int = 0
    """Number of the first sample."""
    top_logprobs: int = 0
    """Most likely ids to return beside each token; changes no token."""
    prompt_logprobs: bool = False
    """Also score the prompt; changes no token."""

    def __post_init__(self):
        for name, least in WHOLE.items():
            value = self._whole(name, getattr(self, name))
            most = {"seed": LARGEST_SEED, "n": MOST_SAMPLES}.get(name, LARGEST)
            if not least <= value <= most:
                raise GlmError(f"{name}: {value}; must be {least} to {most}")
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value):
                raise GlmError(f"{name}: {value!r} is no finite number; give one")
        if self.temperature and self.temperature < COLDEST:
            raise GlmError(
                f"temperature: {self.temperature}; must be 0 (greedy) or at least {COLDEST}"
            )
        if not 0 < self.top_p <= 1:
            raise GlmError(f"top_p: {self.top_p}; must be above 0 and at most 1 (1 keeps all)")
        if not 0 <= self.min_p < 1:
            raise GlmError(f"min_p: {self.min_p}; must be at least 0 and below 1 (0 keeps all)")
        if self.min_tokens > self.max_tokens:
            raise GlmError(
                f"min_tokens: {self.min_tokens} is more than max_tokens = {self.max_tokens}; "
                "lower it"
            )
        if self.first_sample + self.n > LARGEST:
            raise GlmError(f"first_sample: {self.first_sample} with n = {self.n}; lower it")
        self._check_stops()

    def _check_stops(self) -> None:
        for name in ("stop_ids", "stop"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise GlmError(f"{name}: {value!r}; give a tuple, even of one")
            object.__setattr__(self, name, tuple(value))
        object.__setattr__(
            self, "stop_ids", tuple(self._whole("stop_ids", x, False) for x in self.stop_ids)
        )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise GlmError(f"stop: {text!r}; give strings of at least one character")
        if not isinstance(self.prompt_logprobs, bool):
            raise GlmError(f"prompt_logprobs: {self.prompt_logprobs!r}; give True or False")

    def _whole(self, name: str, value: Any, store: bool = True) -> int:
        """The value as a Python integer."""
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise GlmError(f"{name}: {value!r} is no whole number; give one") from None
        if store:
            object.__setattr__(self, name, value)
        return value

    @property
    def greedy(self) -> bool:
        """Whether the most likely id is taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from some ids only, which are then recorded."""
        few = self.min_tokens > 0 and bool(self.stop_ids)
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or few)
