"""The one input of the forward: a flat list of tokens, grouped by the sequence they belong to."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """A flat list of T tokens.

    Prefill, chunked prefill, decode, scoring and training build one of these and call the same
    forward. A token attends to its own slot only. Padding is marked in `valid_T` and changes
    nothing.
    """

    ids_T: Int[Array, "T"]
    positions_T: Int[Array, "T"]
    """Position of each token in its own sequence, from 0."""
    slots_T: Int[Array, "T"]
    """Sequence slot of each token: where the cache keeps its keys."""
    valid_T: Bool[Array, "T"]
    rows: int = dataclasses.field(default=1, metadata={"static": True})
    """Every run of `rows` tokens is known to share a slot. Native arithmetic takes its shapes from
    it; pinned arithmetic treats every token by itself."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.ids_T.shape[0]

    @property
    def n_groups(self) -> int:
        """Number of runs."""
        return self.n_tokens // self.rows

    @property
    def slots_G(self) -> Int[Array, "G"]:
        """Slot of each run."""
        return self.slots_T[:: self.rows]

    @property
    def n_used(self) -> Int[Array, ""]:
        """Number of tokens up to the last valid one (traced)."""
        place_T = jnp.arange(1, self.n_tokens + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(self.valid_T, place_T, 0))

    def padded(self, n_tokens: int) -> "TokenBatch":
        """The batch with invalid tokens appended; runs that no longer fit become single tokens."""
        extra = n_tokens - self.n_tokens
        if extra == 0:
            return self

        def pad(x_T):
            return jnp.concatenate([x_T, jnp.zeros(extra, x_T.dtype)])

        fields = (self.ids_T, self.positions_T, self.slots_T, self.valid_T)
        return TokenBatch(*map(pad, fields), rows=self.rows if extra % self.rows == 0 else 1)

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
            GlmError: an empty batch or sequence, an id outside the vocabulary, a position that is
                no integer or does not fit `max_position_embeddings`, or too few `rows`.
        """
        arrays = [_flat_ids(i, sequence) for i, sequence in enumerate(sequences)]
        start = [0] * len(arrays) if start is None else _integers("start", start)
        longest = _check_sequences(cfg, arrays, start)
        rows = longest if rows is None else _integers("rows", [rows])[0]
        if rows < longest:
            raise GlmError(
                f"rows: {rows} is shorter than the longest sequence ({longest} tokens); give at "
                f"least {longest}, or leave it out"
            )
        n = len(arrays)
        ids_GR, valid_GR = np.zeros((n, rows), np.int32), np.zeros((n, rows), bool)
        for i, sequence in enumerate(arrays):
            ids_GR[i, : len(sequence)], valid_GR[i, : len(sequence)] = sequence, True
        positions_GR = np.asarray(start, np.int32)[:, None] + np.arange(rows, dtype=np.int32)[None]
        return cls(
            ids_T=jnp.asarray(ids_GR.reshape(-1)),
            positions_T=jnp.asarray(positions_GR.reshape(-1)),
            slots_T=jnp.repeat(jnp.arange(n, dtype=jnp.int32), rows),
            valid_T=jnp.asarray(valid_GR.reshape(-1)),
            rows=rows,
        )


def _flat_ids(i: int, sequence: Any) -> np.ndarray:
    """The ids of one sequence, still to be checked against the vocabulary."""
    need = "need a non-empty flat list of token ids"
    try:
        ids = np.asarray(sequence)
    except ValueError as error:
        raise GlmError(f"sequences[{i}]: is a ragged list of lists; {need}") from error
    if ids.ndim != 1 or ids.size == 0:
        raise GlmError(f"sequences[{i}]: shape {ids.shape}; {need}")
    if not np.issubdtype(ids.dtype, np.integer):
        raise GlmError(f"sequences[{i}]: dtype {ids.dtype}; token ids are integers; {need}")
    return ids


def _integers(name: str, values: Sequence[Any]) -> list[int]:
    """The values as Python integers; a fraction is never cut off."""
    out = []
    for value in values:
        try:
            if isinstance(value, bool | np.bool_):
                raise TypeError
            out.append(operator.index(value))
        except TypeError:
            raise GlmError(f"{name}: {value!r} is no integer; give whole numbers") from None
    return out


def _check_sequences(cfg: GlmConfig, sequences: list[np.ndarray], start: list[int]) -> int:
    """Length of the longest sequence, after the checks that `from_sequences` promises."""
    if not sequences:
        raise GlmError("sequences: the batch is empty; give at least one sequence of token ids")
    if len(start) != len(sequences):
        raise GlmError(
            f"start: {len(start)} positions for {len(sequences)} sequences; give one a sequence"
        )
    for i, (sequence, first) in enumerate(zip(sequences, start, strict=True)):
        bad = np.flatnonzero((sequence < 0) | (sequence >= cfg.vocab_size))
        if bad.size:
            raise GlmError(
                f"sequences[{i}][{bad[0]}]: token id {sequence[bad[0]]} is outside the vocabulary "
                f"(0 to {cfg.vocab_size - 1}); check the tokenizer"
            )
        if first < 0:
            raise GlmError(f"start[{i}]: {first} is negative; positions count from 0")
        if first + len(sequence) > cfg.max_position_embeddings:
            raise GlmError(
                f"sequences[{i}]: positions {first} to {first + len(sequence) - 1} do not fit "
                f"max_position_embeddings = {cfg.max_position_embeddings}; shorten the sequence"
                + (" or start it earlier" if first else "")
            )
    return max(map(len, sequences))
