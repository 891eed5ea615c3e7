"""Packing sequences for training, and the canonical order of their chunks."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from glm_jax.batch import TokenBatch
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.head import Shaping
from glm_jax.numerics.contract import NumericsContract
from glm_jax.training.accumulate import CHUNK_BITS, SEQUENCE_BITS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Packed sequences, each in consecutive rows from its first token on."""

    batch: TokenBatch
    targets_T: Int[Array, "T"]
    """Token whose log-probability each row is scored for."""
    start_n: Int[Array, "n"]
    """First row of each chunk, in canonical order; chunks never span sequences."""
    length_n: Int[Array, "n"]
    """Valid rows of each chunk."""
    origin_n: Int[Array, "n"]
    """Row of the first token of the chunk's sequence."""
    index_n: Int[Array, "n"]
    """Canonical index of each chunk, ascending: `sequence * 2^13 + chunk`."""
    n_chunks: Int[Array, ""]
    max_length: int = dataclasses.field(metadata={"static": True})
    """Longest sequence that fits (the cache's capacity a slot)."""
    n_slots: int = dataclasses.field(metadata={"static": True})
    """Sequences that fit."""
    shaping: Shaping | None = None
    """What the targets were sampled from, where it is not the model's own distribution."""


def canonical_order(sequences: Sequence[np.ndarray]) -> list[int]:
    """Order of sequences by content: independent of how the caller listed or packed them.

    Equal sequences have equal gradients only under equal weights of their tokens; the trainer sorts
    the full data (tokens, targets, coefficients), of which this is the key.
    """
    return sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), sequences[i].tobytes()))


def pack(
    cfg: GlmConfig,
    contract: NumericsContract,
    sequences: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    n_rows: int,
    max_length: int,
    placement: Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
    shaping: Sequence[Shaping] | None = None,
    n_slots: int | None = None,
    n_chunks: int | None = None,
) -> tuple[TrainBatch, list[slice]]:
    """Packs sequences into `n_rows` rows.

    Args:
        cfg: the model's config.
        contract: its `token_leaf` is the chunk size.
        sequences: token ids, in canonical order.
        targets: for each sequence, the id that each position is scored for.
        n_rows: rows of the batch (a bucket); the rest is padding.
        max_length: bucket of the longest sequence.
        placement: order in which the sequences are laid out (default: as given). It changes no bit
            of any gradient.
        numbers: of each sequence among all of the step, ascending (default: from 0 on).
        shaping: for each sequence, the temperatures and kept sets of its positions (host arrays);
            kept sets for all sequences or for none.
        n_slots: sequences that the batch has room for (default: a power of two that suffices).
        n_chunks: the same of chunks. With both fixed, one program serves all batches.

    Returns:
        The batch, and for each sequence the rows it occupies.

    Raises:
        GlmError: something does not fit, or lengths differ.
    """
    placement = range(len(sequences)) if placement is None else placement
    numbers = range(len(sequences)) if numbers is None else numbers
    _check(cfg, sequences, targets, n_rows, max_length, placement)
    _check_numbers(contract, sequences, numbers)
    ids, positions, slots, scored = (np.zeros(n_rows, np.int32) for _ in range(4))
    valid = np.zeros(n_rows, bool)
    rows: list[slice] = [slice(0)] * len(sequences)
    at = 0
    for slot, i in enumerate(placement):
        n = len(sequences[i])
        rows[i] = slice(at, at + n)
        ids[rows[i]], scored[rows[i]] = sequences[i], targets[i]
        positions[rows[i]], slots[rows[i]], valid[rows[i]] = np.arange(n), slot, True
        at += n
    chunks = [
        (first, min(contract.token_leaf, r.stop - first), r.start, (number << CHUNK_BITS) + chunk)
        for number, r in zip(numbers, rows, strict=True)
        for chunk, first in enumerate(range(r.start, r.stop, contract.token_leaf))
    ]
    # A power of two, so that few shapes are compiled.
    n_chunks = _power_of_two(len(chunks)) if n_chunks is None else n_chunks
    n_slots = _power_of_two(len(sequences)) if n_slots is None else n_slots
    if len(chunks) > n_chunks or len(sequences) > n_slots:
        raise GlmError(
            f"sequences: {len(sequences)} in {len(chunks)} chunks do not fit n_slots = {n_slots} "
            f"and n_chunks = {n_chunks}; use more batches"
        )
    table = np.zeros((n_chunks, 4), np.int32)
    table[: len(chunks)] = chunks
    batch = TokenBatch(
        jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(slots), jnp.asarray(valid)
    )
    start, length, origin, index = map(jnp.asarray, table.T)
    count = jnp.asarray(len(chunks), jnp.int32)
    packed = TrainBatch(
        batch,
        jnp.asarray(scored),
        start,
        length,
        origin,
        index,
        count,
        max_length=max_length,
        n_slots=n_slots,
        shaping=None if shaping is None else _shaping(shaping, rows, n_rows),
    )
    return packed, rows


def _shaping(shaping: Sequence[Shaping], rows: list[slice], n_rows: int) -> Shaping:
    """Rows of no sequence keep everything at temperature 1."""
    temperature_T = np.ones(n_rows, np.float32)
    kept = [one.kept_TW for one in shaping]
    kept_TW = None
    if kept[0] is not None:
        kept_TW = np.full((n_rows, kept[0].shape[1]), 0xFFFFFFFF, np.uint32)
    for i, (row, one) in enumerate(zip(rows, shaping, strict=True)):
        n = row.stop - row.start
        if len(one.temperature_T) != n or np.min(one.temperature_T) <= 0:
            raise GlmError(
                f"shaping[{i}]: needs {n} temperatures above 0, one a token; give 1 where the "
                "model's own distribution is meant"
            )
        if (one.kept_TW is None) != (kept_TW is None):
            raise GlmError(f"shaping[{i}]: kept sets must be given for all sequences or for none")
        temperature_T[row] = one.temperature_T
        if kept_TW is not None and one.kept_TW is not None:
            kept_TW[row] = one.kept_TW
    return Shaping(jnp.asarray(temperature_T), None if kept_TW is None else jnp.asarray(kept_TW))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _check_numbers(contract, sequences, numbers):
    room = 1 << SEQUENCE_BITS
    ascending = all(a < b for a, b in itertools.pairwise(numbers))
    if len(numbers) != len(sequences) or not ascending or numbers[0] < 0 or numbers[-1] >= room:
        raise GlmError(
            f"numbers: {list(numbers)} for {len(sequences)} sequences; give one a sequence, "
            f"ascending, from 0 to {room - 1}"
        )
    longest = contract.token_leaf << CHUNK_BITS
    for i, sequence in enumerate(sequences):
        if len(sequence) > longest:
            raise GlmError(
                f"sequences[{i}]: {len(sequence)} tokens, a sequence has at most {longest} in "
                f"{1 << CHUNK_BITS} chunks; raise token_leaf"
            )


def _check(cfg, sequences, targets, n_rows, max_length, placement):
    if not sequences or len(sequences) != len(targets):
        raise GlmError(
            f"sequences: {len(sequences)} with {len(targets)} targets; need one target array for "
            "each of at least one sequence"
        )
    if sorted(placement) != list(range(len(sequences))):
        raise GlmError(f"placement: {list(placement)} is no permutation of the sequences")
    for i, (sequence, target) in enumerate(zip(sequences, targets, strict=True)):
        if len(sequence) != len(target) or not len(sequence):
            raise GlmError(
                f"targets[{i}]: {len(target)} for {len(sequence)} tokens; give one a token"
            )
        if len(sequence) > max_length:
            raise GlmError(
                f"sequences[{i}]: {len(sequence)} tokens, max_length is {max_length}; raise it"
            )
        for name, ids in (("sequences", sequence), ("targets", target)):
            if np.min(ids) < 0 or np.max(ids) >= cfg.vocab_size:
                raise GlmError(f"{name}[{i}]: ids must be 0 to {cfg.vocab_size - 1}")
    total = sum(map(len, sequences))
    if total > n_rows:
        raise GlmError(f"sequences: {total} tokens do not fit n_rows = {n_rows}; use more batches")
