"""The sequences of a trial and the sizes of its caches, drawn from a seed."""

import dataclasses

import numpy as np
from jaxtyping import Array

from glm_jax.config import GlmConfig
from glm_jax.invariance.program import Programs
from glm_jax.invariance.session import CacheShape, Session

SPARE_PAGES = 3
MOST_DECODED = 512
"""Tokens of a sequence that a decoding phase generates one by one; those before are prefilled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How long and how many the sequences of a trial are."""

    n_sequences: int = 5
    capacity: int
    """Longest sequence."""

    @classmethod
    def of(cls, cfg: GlmConfig, page_size: int, n_sequences: int = 5) -> "Sizes":
        """Long enough for four times the selected keys, and for more than two pages."""
        most = min(
            max(4 * cfg.index_topk, 2 * page_size + page_size // 2), cfg.max_position_embeddings
        )
        return cls(n_sequences=n_sequences, capacity=most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Sequences under one model; every phase computes all of them."""

    programs: Programs
    leaves: list[Array]
    sequences: tuple[np.ndarray, ...]
    capacity: int
    seed: tuple[int, ...]
    keep: tuple[str, ...] = ()
    """Names of the intermediate values to record; any makes other programs."""
    n_slots: int | None = None
    """Slots of the cache of every phase; default: one a sequence, and one for those alone."""

    @classmethod
    def draw(
        cls,
        programs: Programs,
        leaves: list[Array],
        sizes: Sizes,
        seed: tuple[int, ...],
        *,
        alphabet: int | None = None,
    ) -> "Trial":
        """Random sequences: a short one, the others longer than the selection, one of them full.

        Args:
            programs: the compiled forwards.
            leaves: arrays of the model.
            sizes: how many and how long.
            seed: of the draw and of everything that phases draw.
            alphabet: number of different ids (default: the vocabulary).
        """
        cfg, rng = programs.cfg, np.random.default_rng(seed)
        least = min(2 * cfg.index_topk, sizes.capacity)
        lengths = rng.integers(least, sizes.capacity + 1, sizes.n_sequences)
        lengths[0] = sizes.capacity
        if sizes.n_sequences > 1:
            lengths[-1] = rng.integers(1, 8)
        letters = rng.permutation(cfg.vocab_size)[:alphabet]
        sequences = tuple(letters[rng.integers(0, len(letters), n)] for n in lengths)
        return cls(
            programs=programs,
            leaves=leaves,
            sequences=sequences,
            capacity=sizes.capacity,
            seed=seed,
        )

    @property
    def indices(self) -> range:
        """Numbers of the sequences."""
        return range(len(self.sequences))

    def rng(self, purpose: str) -> np.random.Generator:
        """A stream of its own for each purpose."""
        return np.random.default_rng([*self.seed, *purpose.encode()])

    def alone(self, rng: np.random.Generator) -> Session:
        """A session with room for one sequence and no page to spare."""
        if self.keep or self.n_slots:  # fewer programs
            return self.pool(rng)
        return self._session(CacheShape(1, self.capacity, self._pages(self.capacity)), rng)

    def pool(self, rng: np.random.Generator) -> Session:
        """A session with room for all sequences in a larger cache."""
        capacity = self.capacity + self.programs.contract.key_block
        capacity = min(capacity, self.programs.cfg.max_position_embeddings)
        n = self.n_slots or len(self.sequences)
        n_pages = n * self._pages(capacity) + SPARE_PAGES
        return self._session(CacheShape(n, capacity, n_pages), rng)

    def _pages(self, capacity: int) -> int:
        return -(-capacity // self.programs.contract.key_block)

    def _session(self, shape: CacheShape, rng: np.random.Generator) -> Session:
        return Session(self.programs, self.leaves, self.sequences, shape, rng, self.keep)
