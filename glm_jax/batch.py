"""The one input of the forward: a flat list of tokens, grouped by the sequence they belong to."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """T = G * rows tokens; every run of `rows` tokens belongs to one sequence slot.

    Prefill, decode, scoring and training build one of these and call the same forward. Padding is
    marked in `valid_T` and changes nothing.
    """

    ids_T: Int[Array, "T"]
    positions_T: Int[Array, "T"]
    """Position of each token in its own sequence, from 0."""
    slots_G: Int[Array, "G"]
    """Sequence slot of each run; with a cache, where its keys are kept."""
    valid_T: Bool[Array, "T"]
    rows: int = dataclasses.field(metadata={"static": True})
    """Tokens a run."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.ids_T.shape[0]

    @property
    def n_groups(self) -> int:
        """Number of runs."""
        return self.slots_G.shape[0]

    @classmethod
    def from_sequences(
        cls,
        cfg: GlmConfig,
        sequences: Sequence[Sequence[int]] | np.ndarray,
        *,
        start: Sequence[int] | None = None,
        rows: int | None = None,
    ) -> "TokenBatch":
        """Pads sequences on the right to a rectangle; sequence i goes to slot i.

        Args:
            cfg: the model's config, against which ids and lengths are checked.
            sequences: token ids of each sequence.
            start: position of each sequence's first token (default 0).
            rows: tokens a run (default: the longest sequence).

        Raises:
            GlmError: an empty batch or sequence, an id outside the vocabulary, or a position past
                `max_position_embeddings`.
        """
        arrays = [np.asarray(sequence) for sequence in sequences]
        start = [0] * len(arrays) if start is None else list(start)
        longest = _check_sequences(cfg, arrays, start)
        rows = longest if rows is None else rows
        if rows < longest:
            raise GlmError(f"rows: {rows} is shorter than the longest sequence ({longest} tokens)")
        n = len(arrays)
        ids_GR, valid_GR = np.zeros((n, rows), np.int32), np.zeros((n, rows), bool)
        for i, sequence in enumerate(arrays):
            ids_GR[i, : len(sequence)], valid_GR[i, : len(sequence)] = sequence, True
        positions_GR = np.asarray(start, np.int32)[:, None] + np.arange(rows, dtype=np.int32)[None]
        return cls(
            ids_T=jnp.asarray(ids_GR.reshape(-1)),
            positions_T=jnp.asarray(positions_GR.reshape(-1)),
            slots_G=jnp.arange(n, dtype=jnp.int32),
            valid_T=jnp.asarray(valid_GR.reshape(-1)),
            rows=rows,
        )


def _check_sequences(cfg: GlmConfig, sequences: list[np.ndarray], start: list[int]) -> int:
    """Length of the longest sequence, after the checks that `from_sequences` promises."""
    if not sequences:
        raise GlmError("sequences: the batch is empty; give at least one sequence of token ids")
    if len(start) != len(sequences):
        raise GlmError(f"start: {len(start)} positions for {len(sequences)} sequences")
    for i, (sequence, first) in enumerate(zip(sequences, start, strict=True)):
        if sequence.ndim != 1 or sequence.size == 0:
            raise GlmError(
                f"sequences[{i}]: shape {sequence.shape}; need a non-empty flat list of token ids"
            )
        if not np.issubdtype(sequence.dtype, np.integer):
            raise GlmError(f"sequences[{i}]: dtype {sequence.dtype}; token ids are integers")
        bad = np.flatnonzero((sequence < 0) | (sequence >= cfg.vocab_size))
        if bad.size:
            raise GlmError(
                f"sequences[{i}][{bad[0]}]: token id {sequence[bad[0]]} is outside the vocabulary "
                f"(0 to {cfg.vocab_size - 1}); check the tokenizer"
            )
        if first < 0 or first + len(sequence) > cfg.max_position_embeddings:
            raise GlmError(
                f"sequences[{i}]: positions {first} to {first + len(sequence) - 1} do not fit "
                f"max_position_embeddings = {cfg.max_position_embeddings}; shorten the sequence"
            )
    return max(map(len, sequences))
