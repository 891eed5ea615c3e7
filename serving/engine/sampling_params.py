"""How a request is sampled."""

import dataclasses
import math

from glm_jax.errors import GlmError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request.

    The distribution is softmax(logits / temperature), restricted to the kept ids: first `top_k`,
    then `top_p` over what is left, then `min_p`. A token is a function of the request alone: its
    randomness is keyed by (seed, number of the sample, position).
    """

    max_tokens: int = 128
    min_tokens: int = 0
    """Until so many tokens the stop ids are not kept."""
    temperature: float = 1.0
    """0: the most likely id, ties to the lowest; scored as at temperature 1."""
    top_p: float = 1.0
    """Keep the most likely ids up to the one that brings their sum to `top_p`."""
    top_k: int = 0
    """Keep so many most likely ids, ties to the lower id; 0 keeps all."""
    min_p: float = 0.0
    """Keep ids at least `min_p` times as likely as the most likely one."""
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Strings that end the text and are no part of it (the engine needs a tokenizer)."""
    n: int = 1
    """Samples of the prompt. Sample i of n is sample i of any other n."""
    first_sample: int = 0
    """Number of the first sample."""
    top_logprobs: int = 0
    """Most likely ids to return beside each token."""
    prompt_logprobs: bool = False

    def __post_init__(self):
        whole = ("max_tokens", "min_tokens", "top_k", "seed", "n", "first_sample", "top_logprobs")
        for name in whole:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise GlmError(f"{name}: {value!r} is no whole number; give one")
        least = {"max_tokens": 1, "n": 1}
        for name in whole:
            if (value := getattr(self, name)) < least.get(name, 0):
                raise GlmError(f"{name}: {value}; must be at least {least.get(name, 0)}")
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise GlmError(f"{name}: {value!r} is no finite number; give one")
        if self.temperature < 0 or 0 < self.temperature < 1e-3:
            raise GlmError(f"temperature: {self.temperature}; must be 0 (greedy) or at least 0.001")
        if not 0 < self.top_p <= 1:
            raise GlmError(f"top_p: {self.top_p}; must be above 0 and at most 1 (1 keeps all)")
        if not 0 <= self.min_p < 1:
            raise GlmError(f"min_p: {self.min_p}; must be at least 0 and below 1 (0 keeps all)")
        if self.min_tokens > self.max_tokens:
            raise GlmError(
                f"min_tokens: {self.min_tokens} is more than max_tokens = {self.max_tokens}"
            )
        if self.seed >= 2**32 or self.first_sample + self.n > 2**31:
            raise GlmError(f"seed: {self.seed}; seeds are 0 to 2^32 - 1, samples below 2^31")
        if any(not text for text in self.stop):
            raise GlmError("stop: an empty string would end every text at once; remove it")

    @property
    def greedy(self) -> bool:
        """Whether the most likely id is taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether some ids may not be kept."""
        few = self.min_tokens > 0 and bool(self.stop_ids)
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or few

    @property
    def shaped(self) -> bool:
        """Whether tokens are drawn from another distribution than the model's own."""
        return self.filtered or self.temperature not in (0, 1)
