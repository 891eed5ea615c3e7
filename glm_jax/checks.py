"""Refusals before a batch runs.

Inside a jitted forward an index out of range is clamped or dropped, and a key that was never
written reads as zeros: what is wrong with a batch must be found here, on the host.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Array, Int

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract, require_same


def check_batch(
    cfg: GlmConfig,
    batch: TokenBatch,
    cache: LatentCache | None,
    targets_T: Int[np.ndarray | Array, "T"] | None = None,
    *,
    lengths_U: Int[np.ndarray | Array, "U"] | None = None,
    contract: NumericsContract | None = None,
) -> None:
    """Refuses a batch that a forward would run, but not as meant. Needs concrete arrays.

    Args:
        cfg: the model's config.
        batch: the tokens. What stands in its padding is not looked at.
        cache: the cache that the forward will be given, if any.
        targets_T: token ids whose log-probability is wanted, if any.
        lengths_U: tokens that each slot of the cache holds; the batch's must continue them.
        contract: the numerics asked for, if they must be those of the cache.

    Raises:
        GlmError: lists every problem.
    """
    problems = [*_shapes(batch, cache, targets_T, lengths_U)]
    if not problems:  # the rest indexes one array by another
        tokens = _Tokens.of(batch)
        problems += _ids(cfg, tokens, targets_T)
        problems += _positions(cfg, tokens, cache)
        problems += _runs(batch)
        problems += _slots(tokens, cache, lengths_U)
        if cache is not None:
            problems += _table(cache)
            problems += _pages(tokens, cache)
        if lengths_U is not None:
            problems += _continuation(tokens, np.asarray(lengths_U))
    if cache is not None and contract is not None:
        problems += _contract(cache, contract)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise GlmError(f"batch: {count}:\n  " + "\n  ".join(problems))


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """The valid tokens, and where each stands in the batch."""

    place_V: np.ndarray
    id_V: np.ndarray
    position_V: np.ndarray
    slot_V: np.ndarray

    @classmethod
    def of(cls, batch: TokenBatch) -> "_Tokens":
        place_V = np.flatnonzero(np.asarray(batch.valid_T))
        fields = (batch.ids_T, batch.positions_T, batch.slots_T)
        return cls(place_V, *(np.asarray(x_T)[place_V] for x_T in fields))

    def first(self, wrong_V: np.ndarray) -> Iterator[tuple[int, str]]:
        """The first wrong token, if any, as its number here and a note on how many more follow."""
        found = np.flatnonzero(wrong_V)
        if found.size:
            yield int(found[0]), f" (and {found.size - 1} more)" if found.size > 1 else ""


def _shapes(batch, cache, targets_T, lengths_U) -> Iterator[str]:
    n = batch.n_tokens
    arrays = {name: getattr(batch, name) for name in ("positions_T", "slots_T", "valid_T")}
    for name, array in (arrays | {"targets_T": targets_T}).items():
        if array is not None and array.shape != (n,):
            yield f"{name}: shape {array.shape}, ids_T has {(n,)}; give one entry a token"
    if lengths_U is not None and cache is not None:
        n_slots = cache.table_Up.shape[0]
        if lengths_U.shape != (n_slots,):
            yield f"lengths_U: shape {lengths_U.shape}; give one for each of the {n_slots} slots"
    if batch.rows < 1 or n % batch.rows:
        yield f"rows: {batch.rows} does not divide the batch of {n} tokens; pad it, or use rows=1"


def _ids(cfg: GlmConfig, tokens: _Tokens, targets_T) -> Iterator[str]:
    if not tokens.place_V.size:
        yield "valid_T: no token is valid; do not run an empty batch"
    arrays = {"ids_T": tokens.id_V}
    if targets_T is not None:
        arrays["targets_T"] = np.asarray(targets_T)[tokens.place_V]
    for name, id_V in arrays.items():
        for i, more in tokens.first((id_V < 0) | (id_V >= cfg.vocab_size)):
            yield (
                f"{name}[{tokens.place_V[i]}]: token id {id_V[i]} is outside the vocabulary "
                f"(0 to {cfg.vocab_size - 1}); check the tokenizer{more}"
            )


def _positions(cfg: GlmConfig, tokens: _Tokens, cache: LatentCache | None) -> Iterator[str]:
    position_V = tokens.position_V
    most, capacity = cfg.max_position_embeddings, None if cache is None else cache.capacity
    for i, more in tokens.first(position_V < 0):
        yield _place(tokens, i, f"position {position_V[i]}; positions count from 0{more}")
    for i, more in tokens.first(position_V >= most):
        limit = f"max_position_embeddings is {most}; shorten the sequence"
        yield _place(tokens, i, f"position {position_V[i]}, {limit}{more}")
    if capacity is not None:
        for i, more in tokens.first(position_V >= capacity):
            limit = f"a slot of the cache holds {capacity} tokens; make it larger"
            yield _place(tokens, i, f"position {position_V[i]}, {limit}{more}")
    pair_V = np.stack([tokens.slot_V, position_V])
    order_V = np.lexsort(pair_V[::-1])  # stable: of equals, the first in the batch comes first
    repeats_V = np.zeros(position_V.size, bool)
    repeats_V[order_V[1:]] = (pair_V[:, order_V[1:]] == pair_V[:, order_V[:-1]]).all(axis=0)
    for i, more in tokens.first(repeats_V):
        text = f"slot {tokens.slot_V[i]} has another token at position {position_V[i]}; keep one"
        yield _place(tokens, i, text + more)


def _runs(batch: TokenBatch) -> Iterator[str]:
    slot_GR = np.asarray(batch.slots_T).reshape(-1, batch.rows)
    valid_GR = np.asarray(batch.valid_T).reshape(-1, batch.rows)
    # Native arithmetic takes the slot of a run's first token, valid or not.
    mixed_G = ((slot_GR != slot_GR[:, :1]) & valid_GR).any(axis=1)
    if mixed_G.any():
        first = int(np.flatnonzero(mixed_G)[0]) * batch.rows
        yield (
            f"rows: tokens {first} to {first + batch.rows - 1} are of different slots; the "
            f"{batch.rows} tokens of a run share one, use rows=1 otherwise"
        )


def _slots(tokens: _Tokens, cache: LatentCache | None, lengths_U) -> Iterator[str]:
    known = lengths_U if cache is None else cache.table_Up
    if known is None:
        return  # attending within the batch, any number names a sequence
    n_slots = known.shape[0]
    for i, more in tokens.first((tokens.slot_V < 0) | (tokens.slot_V >= n_slots)):
        text = f"slot {tokens.slot_V[i]}, there are slots 0 to {n_slots - 1}; give one of them"
        yield _place(tokens, i, text + more)


def _pages(tokens: _Tokens, cache: LatentCache) -> Iterator[str]:
    table_Up, size = np.asarray(cache.table_Up), cache.page_size
    slot_V, page_V = tokens.slot_V, tokens.position_V // size
    inside_V = (slot_V >= 0) & (slot_V < len(table_Up))
    inside_V &= (page_V >= 0) & (page_V < table_Up.shape[1])
    lacking_Vp = table_Up[np.where(inside_V, slot_V, 0)] < 0
    own_V = (
        inside_V & np.take_along_axis(lacking_Vp, np.where(inside_V, page_V, 0)[:, None], 1)[:, 0]
    )
    for i, more in tokens.first(own_V):
        text = f"slot {slot_V[i]} has no page for position {tokens.position_V[i]}"
        yield _place(tokens, i, f"{text}; put one in table_Up{more}")
    before_Vp = lacking_Vp & (np.arange(table_Up.shape[1])[None, :] < page_V[:, None])
    for i, more in tokens.first(inside_V & ~own_V & before_Vp.any(axis=1)):
        text = f"slot {slot_V[i]} has no page for position {np.argmax(before_Vp[i]) * size}"
        yield _place(tokens, i, f"{text}, which the token attends; restore it in table_Up{more}")


def _table(cache: LatentCache) -> Iterator[str]:
    table_Up, n_pages = np.asarray(cache.table_Up), cache.latent_LPsC.shape[1]
    for slot, place in np.argwhere((table_Up < -1) | (table_Up >= n_pages))[:1]:
        page = table_Up[slot, place]
        yield f"table_Up[{slot}, {place}]: page {page}; use 0 to {n_pages - 1}, or -1 for none"
    pages, counts = np.unique(table_Up[table_Up >= 0], return_counts=True)
    twice = pages[counts > 1]
    for page in twice[:1]:
        (u, p), (v, q) = np.argwhere(table_Up == page)[:2]
        more = f" (and {twice.size - 1} more pages)" if twice.size > 1 else ""
        yield f"table_Up: page {page} stands at [{u}, {p}] and at [{v}, {q}]; use it once{more}"


def _continuation(tokens: _Tokens, length_U: np.ndarray) -> Iterator[str]:
    for slot in np.unique(tokens.slot_V):
        if not 0 <= slot < len(length_U):
            continue  # is reported by itself
        position_n = np.unique(tokens.position_V[tokens.slot_V == slot])
        first, n = length_U[slot], position_n.size
        if (position_n != first + np.arange(n)).any():
            yield (
                f"slot {slot}: holds {first} tokens, the batch brings {n} at {_span(position_n)}; "
                f"give {_span(first + np.arange(n))}"
            )


def _contract(cache: LatentCache, contract: NumericsContract) -> Iterator[str]:
    try:
        require_same(contract, cache.contract, "cache")
    except GlmError as error:
        yield f"{error}; ask for the cache's contract, or begin a new cache"


def _place(tokens: _Tokens, i: int, text: str) -> str:
    return f"token {tokens.place_V[i]}: {text}"


def _span(position_n: np.ndarray) -> str:
    """Ascending positions as `position 4`, `positions 4 to 6` or `positions 4, 6, ...`."""
    if position_n.size == 1:
        return f"position {position_n[0]}"
    if position_n[-1] - position_n[0] == position_n.size - 1:
        return f"positions {position_n[0]} to {position_n[-1]}"
    listed = ", ".join(map(str, position_n[:4]))
    return f"positions {listed}{', ...' if position_n.size > 4 else ''}"
