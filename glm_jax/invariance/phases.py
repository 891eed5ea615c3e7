"""The ways in which the same tokens are computed.

A phase computes every token of a trial's sequences at least once. Training and serving add theirs
to a copy of `PHASES`; a report names the phases that ran and no others.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from glm_jax.invariance.observations import LOGPROB, Observations
from glm_jax.invariance.session import Span
from glm_jax.invariance.trial import MOST_DECODED, Trial
from glm_jax.training.pack import pack

MOST_ROWS = 256
"""Tokens of a mixed step; more would only add programs."""

Phase = Callable[[Trial], Observations]


def prefill(trial: Trial) -> Observations:
    """Each sequence alone, in one batch."""
    return _alone(trial, "prefill", lambda i, n, rng: [Span(i, 0, n)])


def chunked(trial: Trial) -> Observations:
    """Each sequence alone, cut at random points."""

    def cut(i, n, rng):
        cuts = sorted({0, n, *rng.integers(0, n + 1, rng.integers(1, 6)).tolist()})
        return [Span(i, a, b) for a, b in itertools.pairwise(cuts)]

    return _alone(trial, "chunked", cut)


def decode(trial: Trial) -> Observations:
    """Each sequence alone, one token a step; of very long ones, the last `MOST_DECODED` tokens."""

    def one_by_one(i, n, rng):
        start = max(0, n - MOST_DECODED)
        first = [Span(i, 0, start)] if start else []
        return [*first, *(Span(i, p, p + 1) for p in range(start, n))]

    return _alone(trial, "decode", one_by_one)


def packed(trial: Trial) -> Observations:
    """All sequences in one batch, as a trainer scores them, in two orders."""
    return _join(_packed_once(trial, order) for order in range(2))


def mixed(trial: Trial) -> Observations:
    """Decoding and chunks of all sequences side by side, in random company, rows and pages."""
    return wander(trial, trial.rng("mixed"))


def preempted(trial: Trial) -> Observations:
    """As `mixed`; sequences lose slot and pages midway and start again in other chunks."""
    return wander(trial, trial.rng("preempted"), preempt=0.15)


def prefix(trial: Trial) -> Observations:
    """Each sequence twice, the second time after a hit: of one page, of all whole ones, of a few.

    Both are cut around page borders, and go on side by side until the owner of the pages leaves.
    """
    rng, size = trial.rng("prefix"), trial.programs.contract.key_block
    slots = trial.n_slots or len(trial.sequences)

    def once(i: int, n_pages: int) -> Observations:
        tokens = trial.sequences[i]
        twice = dataclasses.replace(trial, sequences=(tokens, tokens), n_slots=max(2, slots))
        session = twice.pool(rng)
        cuts = _around_borders(len(tokens), size, rng)
        owner = [Span(0, a, b) for a, b in itertools.pairwise(cuts)]
        while owner and owner[0].first < n_pages * size:
            session.feed([owner.pop(0)])
        if n_pages:
            session.share(0, 1, n_pages)
        n_beside = int(rng.integers(0, len(owner) + 1))
        start = n_pages * size
        cuts = [start, *(c for c in _around_borders(len(tokens), size, rng) if c > start)]
        for step, (a, b) in enumerate(itertools.pairwise(cuts)):
            beside = owner[step : step + 1] if step < n_beside else []
            if step == n_beside and 0 in session.held:
                session.drop(0)
            session.feed([Span(1, a, b), *beside], scatter=bool(rng.random() < 0.5))
        found = session.observations()
        return dataclasses.replace(found, sequence_n=np.full_like(found.sequence_n, i))

    def hits(i: int) -> set[int]:
        most = (len(trial.sequences[i]) - 1) // size
        return {min(1, most), most, int(rng.integers(0, most + 1))}

    return _join(once(i, n_pages) for i in trial.indices for n_pages in sorted(hits(i)))


def train(trial: Trial) -> Observations:
    """All sequences in the trainer's forward, in a random place each; log-probabilities only."""
    programs, rng = trial.programs, trial.rng("train")
    sequences = [np.asarray(x, np.int32) for x in trial.sequences]
    order = rng.permutation(trial.indices).tolist()
    packed_batch, rows = pack(
        programs.cfg,
        programs.contract,
        sequences,
        [np.roll(x, -1) for x in sequences],
        n_rows=programs.bucket(trial.capacity * len(sequences)),
        max_length=trial.capacity,
        placement=order,
    )
    logprob_T = np.asarray(programs.train(trial.leaves, packed_batch))
    logprob_n = np.concatenate([logprob_T[row] for row in rows])
    return Observations(
        sequence_n=np.repeat(trial.indices, [len(x) for x in sequences]),
        position_n=np.concatenate([np.arange(len(x)) for x in sequences]),
        columns={LOGPROB: logprob_n.view(np.uint32).astype(np.uint64)},
        finite=bool(np.isfinite(logprob_n).all()),
    )


PHASES: Mapping[str, Phase] = MappingProxyType(
    {
        "prefill": prefill,
        "chunked": chunked,
        "decode": decode,
        "mixed": mixed,
        "packed": packed,
        "preempted": preempted,
        "prefix": prefix,
        "train": train,
    }
)
REFERENCE = "prefill"
"""The phase that the others are compared with."""


def wander(
    trial: Trial, rng: np.random.Generator, *, preempt: float = 0.0, until: int | None = None
) -> Observations:
    """Computes all sequences in randomly composed steps.

    Args:
        trial: the sequences.
        rng: decides who runs, how many tokens, in which rows, slots and pages.
        preempt: chance of a sequence, at each of its steps, to lose its pages; every one does once,
            at the latest when half of it is done, unless the chance is 0.
        until: stop when this sequence is done.
    """
    session = trial.pool(rng)
    done = dict.fromkeys(trial.indices, 0)
    untouched = set(trial.indices) if preempt else set()
    contract = trial.programs.contract
    small_tiles = [tile for tile in contract.row_tiles if tile <= contract.block_below]
    while unfinished := [i for i in trial.indices if done[i] < len(trial.sequences[i])]:
        spans = _company(trial, unfinished, done, rng)
        room = int(rng.choice(small_tiles)) if rng.random() < 0.2 else 0
        session.feed(spans, scatter=bool(rng.random() < 0.5), room=room)
        for i, _, last in spans:
            n, done[i] = len(trial.sequences[i]), last
            if i in untouched and (rng.random() < preempt or 2 * last > n):
                untouched.remove(i)
                session.drop(i)
                done[i] = 0
            elif last == n:
                session.drop(i)
        if until is not None and done[until] == len(trial.sequences[until]):
            break
    return session.observations()


def _company(
    trial: Trial,
    unfinished: list[int],
    done: dict[int, int],
    rng: np.random.Generator,
) -> list[Span]:
    """Some of the unfinished sequences, each with its next few tokens, in random order."""
    n_running = int(rng.integers(1, len(unfinished) + 1))
    left, spans = MOST_ROWS, []
    for i in rng.permutation(unfinished)[:n_running].tolist():
        n_left = len(trial.sequences[i]) - done[i]
        size = min(_chunk(rng, trial.capacity), n_left, left)
        if size > 0:
            spans.append(Span(i, done[i], done[i] + size))
            left -= size
    return spans


def _chunk(rng: np.random.Generator, capacity: int) -> int:
    """One token (decoding), a few (drafts), or a chunk of a prompt."""
    kind = rng.random()
    if kind < 0.4:
        return 1
    return int(rng.integers(2, 10) if kind < 0.75 else rng.integers(10, max(11, capacity // 2)))


def _around_borders(n: int, size: int, rng: np.random.Generator) -> list[int]:
    """Where to cut `n` tokens: at, before or after each border of a page, and anywhere once."""
    borders = [k + int(rng.integers(-1, 2)) for k in range(size, n + 1, size)]
    return sorted({0, n, int(rng.integers(0, n)), *(c for c in borders if 0 < c < n)})


def _packed_once(trial: Trial, order: int) -> Observations:
    rng = trial.rng(f"packed {order}")
    session = trial.pool(rng)
    spans = [Span(i, 0, len(trial.sequences[i])) for i in rng.permutation(trial.indices).tolist()]
    total = trial.capacity * len(trial.sequences)
    session.feed(spans, scatter=order > 0, room=0 if trial.keep else total)
    return session.observations()


def _alone(
    trial: Trial, name: str, spans_of: Callable[[int, int, np.random.Generator], list[Span]]
) -> Observations:
    def each() -> Iterator[Observations]:
        rng = trial.rng(name)
        for i in trial.indices:
            session = trial.alone(rng)
            for span in spans_of(i, len(trial.sequences[i]), rng):
                session.feed([span])
            yield session.observations()

    return _join(each())


def _join(parts: Iterator[Observations]) -> Observations:
    found = list(parts)
    return Observations(
        sequence_n=np.concatenate([x.sequence_n for x in found]),
        position_n=np.concatenate([x.position_n for x in found]),
        columns={key: np.concatenate([x.columns[key] for x in found]) for key in found[0].columns},
        finite=all(x.finite for x in found),
    )
