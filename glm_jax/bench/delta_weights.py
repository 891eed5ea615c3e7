"""Old and new bf16 weights as a run of RL makes them: f32 masters, Adam, gradients with holes."""

import dataclasses
from collections.abc import Iterator

import ml_dtypes
import numpy as np

WARM_STEPS = 12
"""Steps of Adam before the first that moves weights: the moments are those of a run under way."""
_BETA1, _BETA2 = np.float32(0.9), np.float32(0.95)
_SIGNAL = np.float32(0.1)
"""Part of the gradient that is the same in each batch, against noise of 1."""


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """How new weights differ from old ones."""

    masters: str
    """`new`: masters have full fractions; `cold`: they begin on bf16 values, as just loaded."""
    lr: float
    steps: int

    def __str__(self) -> str:
        return f"{self.masters} {self.lr:g}, {self.steps} step{'s' * (self.steps > 1)}"


CASES = (
    Case("cold", 1e-6, 1),
    Case("new", 1e-6, 1),
    Case("new", 1e-6, 8),
    Case("new", 5e-6, 1),
    Case("new", 1e-5, 1),
    Case("new", 5e-6, 8),
)

FULL_VOCAB, FULL_LAYERS, WIDTH = 16384, 12, 2048


def shapes(vocab: int, n_layers: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a model: embedding, head, and per layer a projection, a norm, two experts."""
    found: dict[str, tuple[int, ...]] = {"embed": (vocab, WIDTH), "lm_head": (vocab, WIDTH)}
    for i in range(n_layers):
        found[f"layers.{i}.attn.q_b"] = (WIDTH, 1024)
        found[f"layers.{i}.norm"] = (WIDTH,)
        found |= {f"layers.{i}.experts.{j}.up": (512, 4096) for j in range(2)}
    return found


def weights(
    vocab: int, n_layers: int, *, seed: int = 0
) -> Iterator[tuple[str, np.ndarray, dict[Case, np.ndarray]]]:
    """Yields name, old bf16 array and the new one of each of `CASES`, a tensor at a time."""
    for number, (name, shape) in enumerate(shapes(vocab, n_layers).items()):
        rng = np.random.default_rng((seed, number))
        yield name, *_updated(rng, name, shape)


def _updated(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> tuple[np.ndarray, dict[Case, np.ndarray]]:
    first = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    first += np.float32(name.endswith("norm"))
    old = first.astype(ml_dtypes.bfloat16)
    signal = _SIGNAL * rng.standard_normal(shape, np.float32)
    rows = np.exp(rng.standard_normal((shape[0],) + (1,) * (len(shape) - 1), np.float32))
    mean, square = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    starts = {"new": first, "cold": old.astype(np.float32)}
    masters = {(x.masters, x.lr): starts[x.masters].copy() for x in CASES}
    found = {}
    for t in range(1, WARM_STEPS + max(x.steps for x in CASES) + 1):
        gradient = _gradient(rng, name, shape, signal, rows)
        mean += (1 - _BETA1) * (gradient - mean)
        square += (1 - _BETA2) * (gradient * gradient - square)
        if t <= WARM_STEPS:
            continue
        scale = np.sqrt(square / (1 - _BETA2**t)) + np.float32(1e-12)
        update = mean / (1 - _BETA1**t) / scale
        for (kind, lr), master in masters.items():
            master -= np.float32(lr) * update
            if (case := Case(kind, lr, t - WARM_STEPS)) in CASES:
                found[case] = master.astype(ml_dtypes.bfloat16)
    return old, {case: found[case] for case in CASES}


def _gradient(
    rng: np.random.Generator,
    name: str,
    shape: tuple[int, ...],
    signal: np.ndarray,
    rows: np.ndarray,
) -> np.ndarray:
    if ".experts." in name and rng.random() > 0.8:  # no token of the batch went to this expert
        return np.zeros(shape, np.float32)
    noise = rng.standard_normal(shape, np.float32)
    noise *= np.float32(np.exp(0.5 * rng.standard_normal()))
    gradient = (noise + signal) * rows
    if name == "embed":  # only rows of tokens in the batch, which are few and follow Zipf
        share = np.arange(1, shape[0] + 1) ** -1.05
        seen = rng.choice(shape[0], 2 * shape[0], p=share / share.sum())
        gradient[np.bincount(seen, minlength=shape[0]) == 0] = 0
    return gradient
