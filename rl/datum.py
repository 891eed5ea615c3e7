"""One training sequence: its tokens, what each position is scored for, and the inputs of a loss."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from glm_jax.config_fields import LARGEST_SIZE, nearest
from glm_jax.errors import GlmError

PER_TOKEN = ("weights", "logprobs", "advantages", "ref_logprobs", "temperature")
"""Inputs with a number a token."""
KEPT = "kept"
"""Bits of the ids that could be sampled, `[N, ceil(V / 32)]`, uint32."""
INPUTS = ("target_tokens", *PER_TOKEN, KEPT)


@dataclasses.dataclass(frozen=True, eq=False)
class Datum:
    """N tokens and what the loss needs of each. Arrays are copied, and read-only.

    `loss_fn_inputs`: `target_tokens` (required): the id that each position is scored for, that is
    the next token. `weights`: which tokens count, and how much (default 1 wherever the loss has its
    other inputs). `logprobs`: what the sampler said of the targets. `advantages`. `ref_logprobs`:
    of a reference model. `temperature` and `kept`: the distribution the targets were sampled from,
    where it is not the model's own. Values at positions of weight 0 are never read, even if NaN;
    only their ids must be valid.
    """

    tokens: np.ndarray
    loss_fn_inputs: Mapping[str, np.ndarray]

    def __post_init__(self):
        tokens = _integers("tokens", self.tokens, np.int32)
        if tokens.ndim != 1 or not tokens.size:
            raise GlmError(f"datum: tokens have shape {tokens.shape}; need a list of at least one")
        inputs = {}
        for name, value in self.loss_fn_inputs.items():
            if name not in INPUTS:
                hint = nearest(name, INPUTS)
                raise GlmError(f"datum: loss_fn_inputs has {name!r}: {hint}use {', '.join(INPUTS)}")
            array = _array(name, value)
            if array.shape[:1] != tokens.shape or array.ndim != (2 if name == KEPT else 1):
                raise GlmError(
                    f"datum: {name} has shape {array.shape} for {tokens.size} tokens; give one a "
                    "token"
                )
            inputs[name] = array
        if "target_tokens" not in inputs:
            raise GlmError("datum: loss_fn_inputs lacks target_tokens; give the next token of each")
        weights = inputs.setdefault("weights", np.ones(tokens.shape, np.float32))
        if not np.isfinite(weights).all():
            raise GlmError("datum: weights are not all finite; use 0 where a token does not count")
        for array in (tokens, *inputs.values()):
            array.flags.writeable = False
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "loss_fn_inputs", inputs)

    @property
    def targets(self) -> np.ndarray:
        """The id that each position is scored for `[N]`."""
        return self.loss_fn_inputs["target_tokens"]

    @property
    def weights(self) -> np.ndarray:
        """How much each token counts `[N]`, f32."""
        return self.loss_fn_inputs["weights"]

    def key(self) -> tuple[int, bytes, str, bytes]:
        """Sorts data by what a loss reads of them, whatever order they were given in."""
        names, ignored = sorted(self.loss_fn_inputs), self.weights == 0
        read = [self.loss_fn_inputs[name].copy() for name in names]
        for array in read:
            # What is not read must not decide the order of a sum either.
            array[ignored] = 0
        content = b"".join(array.tobytes() for array in read)
        return len(self.tokens), self.tokens.tobytes(), " ".join(names), content


def _array(name: str, value: Any) -> np.ndarray:
    if name == "target_tokens":
        return _integers(name, value, np.int32)
    if name == KEPT:
        return _integers(name, value, np.uint32)
    try:
        with np.errstate(over="ignore"):  # what is too large for f32 is then not finite
            return np.array(value, np.float32)
    except (TypeError, ValueError) as error:
        raise GlmError(f"datum: {name}: {error}; give one number a token") from error


def _integers(name: str, value: Any, dtype: Any) -> np.ndarray:
    """A copy; a cast alone would cut 1.7 and wrap 2**32 + 1 to valid ids."""
    remedy = f"datum: {name} {value!r:.60}: give integers from 0 to"
    largest = LARGEST_SIZE if dtype is np.int32 else 2**32 - 1
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise GlmError(f"{remedy} {largest}, one a token") from error
    if array.dtype.kind not in "iu" or (
        array.size and not 0 <= array.min() <= array.max() <= largest
    ):
        raise GlmError(f"{remedy} {largest}, one a token")
    return array.astype(dtype)
