"""Losses of log-probabilities, with their derivatives: p of the model now, q of the sampler.

Token level, summed over tokens with weight w; r = exp(p - q), A the advantage:

    cross_entropy        -w p
    importance_sampling  -w r A
    ppo                  -w min(r A, clip(r, lo, hi) A); with dual_clip c: not below c A for A < 0
    cispo                -w stop(clip(r, lo, hi)) A p
    dro                  -w (A p - beta/2 (p - q)^2)
    gspo                 ppo with the sequence's r = exp(mean_w(p - q)) for each of its tokens

`kl_beta` > 0 adds w kl_beta k3 against `ref_logprobs`, k3 = exp(ref - p) - (ref - p) - 1. Means are
taken by the caller through w. All in f64 on the host, a sequence at a time, so that a value depends
on its own sequence only; a ratio of equal bits is exactly 1.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from glm_jax.config_fields import nearest
from glm_jax.errors import GlmError
from rl.datum import Datum


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Constants of the losses; each uses those its formula names."""

    clip_low_threshold: float = 0.8
    """Smallest ratio that is not clipped (absolute)."""
    clip_high_threshold: float = 1.2
    dual_clip: float | None = None
    beta: float = 0.05
    """Of `dro`."""
    kl_beta: float = 0.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if name == "dual_clip" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise GlmError(f"loss: {name} {value!r}; must be a number")
        if not 0 <= self.clip_low_threshold <= 1 <= self.clip_high_threshold:
            raise GlmError(
                f"loss: clip thresholds {self.clip_low_threshold} and {self.clip_high_threshold} "
                "are absolute ratios; the first is at most 1, the second at least 1"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise GlmError(f"loss: dual_clip {self.dual_clip}; must be above 1, or None")
        if not 0 <= self.kl_beta < math.inf or not 0 <= self.beta < math.inf:
            raise GlmError(
                f"loss: kl_beta {self.kl_beta}, beta {self.beta}; must be finite, not negative"
            )

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> "LossConfig":
        """From a mapping. Raises `GlmError` for an unknown key."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in config or {}:
            if name not in names:
                raise GlmError(f"loss_fn_config: {name!r} is unknown: {nearest(name, names)}use "
                               f"{', '.join(names)}")  # fmt: skip
        return cls(**(config or {}))


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """The loss of one sequence."""

    loss: float
    d_logp: np.ndarray
    """Derivative by each log-probability `[N]`, f32; exactly 0 where the weight is."""
    ratio: np.ndarray | None = None
    """Ratios of the tokens that count, f64."""
    clipped: np.ndarray | None = None
    """Of them, whether clipping took the gradient."""


type Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]
"""Value and derivative by p of each counting token before weighing, ratios, clipped."""


def _cross_entropy(p, q, a, w, config: LossConfig) -> Parts:
    return -p, -np.ones_like(p), None, None


def _importance_sampling(p, q, a, w, config: LossConfig) -> Parts:
    r = np.exp(p - q)
    return -r * a, -r * a, r, np.zeros(r.shape, bool)


def _ppo(p, q, a, w, config: LossConfig) -> Parts:
    r = np.exp(p - q)
    value, d_ratio, clipped = _clipped(r, a, config)
    return value, d_ratio * r, r, clipped


def _gspo(p, q, a, w, config: LossConfig) -> Parts:
    if (w < 0).any():
        raise GlmError("loss_fn gspo: a weight is negative; give weights of at least 0")
    share = w / w.sum()
    r = np.exp(np.full(p.shape, (share * (p - q)).sum()))
    value, d_ratio, clipped = _clipped(r, a, config)
    # Every token's p moves the ratio of all: sum over tokens t of w_t dvalue_t/dr * r * share_s.
    through = (w * d_ratio * r).sum()
    return value, through * share / w, r, clipped


def _cispo(p, q, a, w, config: LossConfig) -> Parts:
    r = np.exp(p - q)
    held = np.clip(r, config.clip_low_threshold, config.clip_high_threshold)
    return -held * a * p, -held * a, r, held != r


def _dro(p, q, a, w, config: LossConfig) -> Parts:
    difference = p - q
    value = -(a * p - config.beta / 2 * difference**2)
    return value, -(a - config.beta * difference), np.exp(difference), np.zeros(p.shape, bool)


def _clipped(r: np.ndarray, a: np.ndarray, config: LossConfig) -> tuple[np.ndarray, ...]:
    """Negated surrogate, its derivative by the ratio, and where clipping took that."""
    held = np.clip(r, config.clip_low_threshold, config.clip_high_threshold)
    surrogate, d_ratio = r * a, a.copy()
    clipped = held * a < surrogate
    surrogate, d_ratio = np.where(clipped, held * a, surrogate), np.where(clipped, 0.0, d_ratio)
    if config.dual_clip is not None:
        floor = np.where(a < 0, config.dual_clip * a, -np.inf)
        below = surrogate < floor
        surrogate, d_ratio = np.where(below, floor, surrogate), np.where(below, 0.0, d_ratio)
        clipped = clipped | below
    return -surrogate, -d_ratio, clipped


_LOSSES: dict[str, Callable[..., Parts]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "dro": _dro,
}
LOSSES = tuple(_LOSSES)


def check_loss(name: str) -> None:
    """Raises `GlmError` for an unknown loss."""
    if name not in _LOSSES:
        raise GlmError(f"loss_fn {name!r}: {nearest(name, LOSSES)}use one of {', '.join(LOSSES)}")


def token_loss(name: str, datum: Datum, logp: np.ndarray, config: LossConfig) -> TokenLoss:
    """The loss of one sequence and its derivative by each log-probability.

    Args:
        name: which loss.
        datum: the sequence.
        logp: log-probabilities of the targets now `[N]`, f32.
        config: constants.

    Raises:
        GlmError: an unknown loss, an input that it needs is missing, or a value at a token that
            counts is not finite.
    """
    check_loss(name)
    counts, inputs = datum.weights != 0, datum.loss_fn_inputs
    needs = ("logprobs", "advantages") if name != "cross_entropy" else ()
    needs += ("ref_logprobs",) if config.kl_beta else ()
    for key in needs:
        if key not in inputs:
            raise GlmError(f"loss_fn {name}: needs {key}; give them in loss_fn_inputs")
    d_logp = np.zeros(len(logp), np.float32)
    if not counts.any():
        return TokenLoss(0.0, d_logp)
    values = {"logp": logp, **{key: inputs[key] for key in needs}}
    for key, value in values.items():
        # Selected, never multiplied: what stands at other positions does not matter.
        values[key] = value[counts].astype(np.float64)
        if not np.isfinite(values[key]).all():
            at = np.flatnonzero(counts)[np.flatnonzero(~np.isfinite(values[key]))[0]]
            raise GlmError(f"loss_fn {name}: {key} of token {at} is {value[at]}; nothing was added")
    p, w = values["logp"], datum.weights[counts].astype(np.float64)
    q, a = values.get("logprobs", p), values.get("advantages", p)
    with np.errstate(over="ignore", invalid="ignore"):  # looked at below, token by token
        value, d, ratio, clipped = _LOSSES[name](p, q, a, w, config)
        if config.kl_beta:
            difference = values["ref_logprobs"] - p
            value = value + config.kl_beta * (np.exp(difference) - difference - 1)
            d = d + config.kl_beta * (1 - np.exp(difference))
        value, d = w * value, (w * d).astype(np.float32)
    sound = np.isfinite(value) & np.isfinite(d)
    if not sound.all():
        i = np.flatnonzero(~sound)[0]
        raise GlmError(
            f"loss_fn {name}: token {np.flatnonzero(counts)[i]} has the loss {value[i]} with the "
            f"derivative {d[i]} (logp {p[i]}, sampled {q[i]}, weight {w[i]}); nothing was added"
        )
    d_logp[counts] = d
    return TokenLoss(float(value.sum()), d_logp, ratio, clipped)


class LossSum:
    """A loss over data, sequence by sequence in any order, and its metrics."""

    def __init__(self, name: str, config: Mapping[str, Any] | None, data: Sequence[Datum]):
        """Raises `GlmError` for an unknown loss or setting."""
        check_loss(name)
        self._name, self._config, self._data = name, LossConfig.of(config), data
        self._losses: dict[int, TokenLoss] = {}

    def d_logp(self, i: int, logp: np.ndarray) -> np.ndarray:
        """Counts datum `i`, whose targets have the log-probabilities `logp`; their derivatives.

        Raises:
            GlmError: as `token_loss`, with the number of the datum.
        """
        try:
            self._losses[i] = token_loss(self._name, self._data[i], logp, self._config)
        except GlmError as error:
            raise GlmError(f"data[{i}]: {error}") from error
        return self._losses[i].d_logp

    def metrics(self) -> dict[str, float]:
        """The loss, and how ratios lie where the loss has them. Exact sums: no order matters."""
        losses = self._losses.values()
        metrics = {"loss:sum": math.fsum(x.loss for x in losses)}
        ratios = [x.ratio for x in losses if x.ratio is not None]
        if ratios:
            ratio = np.concatenate(ratios)
            clipped = np.concatenate([x.clipped for x in losses if x.clipped is not None])
            metrics |= {
                "ppo/ratio_mean": math.fsum(ratio) / len(ratio),
                "ppo/ratio_max": float(ratio.max()),
                "ppo/clip_frac": float(clipped.mean()),
            }
        return metrics
