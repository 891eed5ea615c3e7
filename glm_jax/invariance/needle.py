"""One sequence in many surroundings: how many different results are there?"""

import collections
import dataclasses
import hashlib
from typing import Any

import numpy as np

from glm_jax.invariance.observations import Observations
from glm_jax.invariance.phases import chunked, prefill, wander
from glm_jax.invariance.program import Notice, Programs
from glm_jax.invariance.trial import Sizes, Trial
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract

MOST_NEIGHBOURS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleResult:
    """What the trials gave."""

    trials: int
    unique: int
    """Different results, the needle alone included: 1 if nothing depends on the surroundings."""
    tokens: int
    """Times that a token of the needle was computed."""
    unequal_tokens: int
    """How many of them differ from the needle alone, in log-probability or final hidden state."""
    shared: int
    """Trials with at least one neighbour."""
    digest: str
    """Of the most frequent result: equal between processes if their bits are."""

    def to_json(self) -> dict[str, Any]:
        """JSON with stable keys."""
        return dataclasses.asdict(self)


def needle_trials(
    model: GlmModel,
    n: int,
    seed: int = 0,
    *,
    contract: NumericsContract | None = None,
    sizes: Sizes | None = None,
    notice: Notice = lambda _: None,
) -> NeedleResult:
    """Computes one fixed sequence alone and in `n` random surroundings.

    Each trial draws neighbours, batch sizes, rows, chunks, slots, pages and preemptions.

    Args:
        model: the parameters.
        n: number of trials.
        seed: of the needle and the surroundings.
        contract: the numerics (default: pinned).
        sizes: longest sequence (default: follows from the config).
        notice: called with what is compiled.
    """
    contract = contract or NumericsContract()
    programs = Programs(model, contract, notice)
    leaves = programs.leaves_of(model)
    sizes = sizes or Sizes.of(model.cfg, contract.key_block)
    rng = np.random.default_rng([seed, 0])
    needle = rng.integers(0, model.cfg.vocab_size, sizes.capacity)
    lone = Trial(
        programs=programs,
        leaves=leaves,
        sequences=(needle,),
        capacity=sizes.capacity,
        seed=(seed, 0),
        n_slots=1 + MOST_NEIGHBOURS,
    )
    reference = prefill(lone)
    results = collections.Counter([_digest(reference)])
    tokens = unequal = shared = 0
    for number in range(1, n + 1):
        n_neighbours = int(rng.integers(0, MOST_NEIGHBOURS + 1))
        lengths = rng.integers(1, sizes.capacity + 1, n_neighbours)
        others = (rng.integers(0, model.cfg.vocab_size, length) for length in lengths)
        trial = dataclasses.replace(lone, sequences=(needle, *others), seed=(seed, number))
        found = _needle_only(_surrounded(trial, rng))
        results[_digest(found)] += 1
        tokens, shared = tokens + found.n_tokens, shared + bool(n_neighbours)
        differs = found.unequal(reference).values()
        unequal += int(np.logical_or.reduce(list(differs)).sum())
    return NeedleResult(
        trials=n,
        unique=len(results),
        tokens=tokens,
        unequal_tokens=unequal,
        shared=shared,
        digest=results.most_common(1)[0][0],
    )


def _surrounded(trial: Trial, rng: np.random.Generator) -> Observations:
    if len(trial.sequences) == 1 and rng.random() < 0.5:
        return chunked(trial)
    preempt = 0.1 if rng.random() < 0.3 else 0.0
    return wander(trial, rng, preempt=preempt, until=0)


def _needle_only(found: Observations) -> Observations:
    mine = found.sequence_n == 0
    return dataclasses.replace(
        found,
        sequence_n=found.sequence_n[mine],
        position_n=found.position_n[mine],
        columns={key: column[mine] for key, column in found.columns.items()},
    )


def _digest(found: Observations) -> str:
    """Hash of all different (position, value...) rows: one more if a recomputed token differs."""
    columns = (found.position_n.astype(np.uint64), *found.columns.values())
    return hashlib.sha256(np.unique(np.stack(columns, 1), axis=0).tobytes()).hexdigest()[:16]
