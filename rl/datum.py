"""One training sequence: its tokens, what each position is scored for, and the inputs of a loss."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from glm_jax.config_fields import nearest
from glm_jax.errors import GlmError

PER_TOKEN = ("weights", "logprobs", "advantages", "ref_logprobs", "temperature")
"""Inputs with a number a token."""
KEPT = "kept"
"""Bits of the ids that could be sampled, `[N, ceil(V / 32)]`, uint32."""
INPUTS = ("target_tokens", *PER_TOKEN, KEPT)


@dataclasses.dataclass(frozen=True)
class Datum:
    """N tokens and what the loss needs of each.

    `loss_fn_inputs`: `target_tokens` (required): the id that each position is scored for, that is
    the next token. `weights`: which tokens count, and how much (default 1 wherever the loss has its
    other inputs). `logprobs`: what the sampler said of the targets. `advantages`. `ref_logprobs`:
    of a reference model. `temperature` and `kept`: the distribution the targets were sampled from,
    where it is not the model's own. Values at positions of weight 0 are never read, even if NaN.
    """

    tokens: np.ndarray
    loss_fn_inputs: Mapping[str, np.ndarray]

    def __post_init__(self):
        tokens = np.asarray(self.tokens)
        if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
            raise GlmError(f"datum: tokens {tokens!r:.60}; need a list of at least one id")
        inputs = {}
        for name, value in self.loss_fn_inputs.items():
            if name not in INPUTS:
                hint = nearest(name, INPUTS)
                raise GlmError(f"datum: loss_fn_inputs has {name!r}: {hint}use {', '.join(INPUTS)}")
            dtype = {"target_tokens": np.int32, KEPT: np.uint32}.get(name, np.float32)
            array = np.asarray(value, dtype)
            if array.shape[:1] != tokens.shape or array.ndim != (2 if name == KEPT else 1):
                raise GlmError(
                    f"datum: {name} has shape {array.shape} for {tokens.size} tokens; give one a "
                    "token"
                )
            inputs[name] = array
        if "target_tokens" not in inputs:
            raise GlmError("datum: loss_fn_inputs lacks target_tokens; give the next token of each")
        weights = inputs.get("weights", np.ones(tokens.shape, np.float32))
        if not np.isfinite(weights).all():
            raise GlmError("datum: weights are not all finite; use 0 where a token does not count")
        object.__setattr__(self, "tokens", tokens.astype(np.int32))
        object.__setattr__(self, "loss_fn_inputs", inputs | {"weights": weights})

    @property
    def targets(self) -> np.ndarray:
        """The id that each position is scored for `[N]`."""
        return self.loss_fn_inputs["target_tokens"]

    @property
    def weights(self) -> np.ndarray:
        """How much each token counts `[N]`, f32."""
        return self.loss_fn_inputs["weights"]

    def key(self) -> tuple[int, bytes]:
        """Sorts data by content, whatever order they were given in."""
        arrays = (self.tokens, *(self.loss_fn_inputs[k] for k in sorted(self.loss_fn_inputs)))
        return len(self.tokens), b"".join(x.tobytes() for x in arrays)
