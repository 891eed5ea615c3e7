"""What is asked for: the options that benchmarks share, and the work of a rectangle of tokens."""

import dataclasses
from typing import Any

import numpy as np

from glm_jax.bench.device import n_cpus
from glm_jax.bench.gemm import SHAPES, GemmShape
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.sizes import Sizes

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Options of every benchmark.

    Raises `GlmError` for a value out of range, with the name of the option.
    """

    cfg: GlmConfig
    dtypes: tuple[str, ...] = DTYPES
    repeats: int = 5
    """Rounds that count."""
    gemm_shapes: tuple[GemmShape, ...] = SHAPES

    def __post_init__(self):
        self.require_positive("repeats")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise GlmError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)} or both")

    def require_positive(self, *names: str) -> None:
        """Refuses a field below 1."""
        for name in names:
            value = getattr(self, name)
            if value < 1:
                raise GlmError(f"--{name.replace('_', '-')} {value}: must be at least 1")

    def require_position(self, name: str) -> None:
        """Refuses a field that is no number of tokens of one sequence."""
        value, most = getattr(self, name), self.cfg.max_position_embeddings
        if not 1 <= value <= most:
            raise GlmError(f"--{name} {value}: must be 1 to max_position_embeddings = {most}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rectangle(Bench):
    """Sequences of equal length; all their tokens are work."""

    batch: int = 8
    """Sequences."""
    length: int = 256
    """Tokens of each."""

    def __post_init__(self):
        self.require_positive("batch")
        self.require_position("length")
        super().__post_init__()

    @property
    def n_tokens(self) -> int:
        """Tokens of the rectangle."""
        return self.batch * self.length

    @property
    def forward_flops(self) -> int:
        """FLOPs of a forward over it, as `Sizes.work` counts them: what the model asks for."""
        return self.batch * Sizes.of(self.cfg).work(0, self.length).forward

    @property
    def ids_BS(self) -> np.ndarray:
        """Token ids, the same in every program."""
        draw = np.random.default_rng(0)
        return draw.integers(self.cfg.vocab_size, size=(self.batch, self.length))

    def work_of_peer(self, task: str, micro_batch: int | None = None) -> dict[str, Any]:
        """The same work in words that another implementation understands.

        Args:
            task: `forward` (logits), `score` (log-probabilities) or `train` (with the backward).
            micro_batch: sequences it may process at once (default: all).
        """
        return {
            "task": task,
            "config": self.cfg.to_hf(),
            "batch": self.batch,
            "micro_batch": micro_batch or self.batch,
            "length": self.length,
            "threads": n_cpus(),
            "dtypes": list(self.dtypes),
        }
