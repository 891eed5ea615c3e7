"""`check_invariance`: every phase against the reference, and a control that must fail."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from glm_jax.errors import GlmError
from glm_jax.invariance.bisection import FirstUnequal, bisect
from glm_jax.invariance.observations import HIDDEN, LAYER_OUT, Observations
from glm_jax.invariance.phases import PHASES, REFERENCE, Phase
from glm_jax.invariance.program import Notice, Programs
from glm_jax.invariance.trial import Sizes, Trial
from glm_jax.invariance.variants import VARIANTS, variant
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract

LAYERED = ("chunked", "decode", "mixed")
"""Phases whose hidden states are compared after every layer too, for the first sequences of each
model variant: that needs programs of their own."""
N_LAYERED = 2
N_CONTROL = 3
UNLOCATED = "unlocated: the difference is gone in programs that keep intermediate values"
PROVED_NOTHING = (
    "the control proved nothing: native numerics gave equal bits too, so this workload cannot show "
    "that pinned numerics matter; use a larger model or more trials"
)


@dataclasses.dataclass
class Count:
    """Tokens compared with the reference."""

    tokens: int = 0
    unequal: int = 0

    def add(self, differs_n: np.ndarray) -> None:
        """Counts a comparison."""
        self.tokens += differs_n.size
        self.unequal += int(differs_n.sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invariance:
    """Result of a check."""

    contract: NumericsContract
    dtype: str
    trials: int
    phases: dict[str, Count]
    """A token counts as often as it was computed. Unequal: log-probability or hidden state."""
    layered: Count
    """The part of it in which hidden states were compared after every layer."""
    first_unequal: dict[str, Any] | None
    control_unequal: int
    facts: dict[str, Any]
    finite: bool

    @property
    def unequal_tokens(self) -> int:
        """Over all phases."""
        return sum(count.unequal for count in self.phases.values())

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the check failed, in sentences; empty if it did not."""
        found = []
        if self.unequal_tokens:
            found.append(f"{self.unequal_tokens} tokens differ from `{REFERENCE}`")
        if not self.control_unequal:
            found.append(PROVED_NOTHING)
        if not self.finite:
            found.append("a log-probability is not finite: equal bits of NaN say nothing")
        return tuple(found)

    @property
    def ok(self) -> bool:
        """Whether all bits are equal and the control shows that they need not be."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """JSON with stable keys."""
        return {
            "mode": self.contract.mode,
            "dtype": self.dtype,
            "trials": self.trials,
            "tokens_compared": sum(count.tokens for count in self.phases.values()),
            "unequal_tokens": self.unequal_tokens,
            "first_unequal": self.first_unequal,
            "phases": {name: dataclasses.asdict(count) for name, count in self.phases.items()},
            "control": {"mode": "native", "unequal_tokens": self.control_unequal},
            "contract_digest": self.contract.digest,
            "ok": self.ok,
            "problems": list(self.problems),
            "reference": REFERENCE,
            "hidden_states_of_every_layer": dataclasses.asdict(self.layered),
            **self.facts,
            "contract": self.contract.to_dict(),
        }


def check_invariance(
    model: GlmModel,
    *,
    trials: int = 3,
    seed: int = 0,
    contract: NumericsContract | None = None,
    phases: Mapping[str, Phase] = PHASES,
    sizes: Sizes | None = None,
    progress: Notice = lambda _: None,
) -> Invariance:
    """Computes random sequences in every phase and compares all bits with the reference phase.

    Trials take the model variants in turn: as given, with planted ties, with full and empty
    experts. The control computes the first sequences of the first trial in native arithmetic,
    alone and by decoding.

    Args:
        model: the parameters; not changed.
        trials: sets of sequences.
        seed: of all draws.
        contract: the numerics (default: pinned).
        phases: what to run; `prefill` is the reference.
        sizes: sequences of a trial (default: follows from the config).
        progress: called with what is being done and compiled.

    Raises:
        GlmError: no trial, or the reference phase is missing.
    """
    if trials < 1:
        raise GlmError(f"trials: {trials}; need at least 1")
    if REFERENCE not in phases:
        raise GlmError(f"phases: {sorted(phases)}; the reference `{REFERENCE}` is missing")
    began, contract = time.perf_counter(), contract or NumericsContract()
    sizes = sizes or Sizes.of(model.cfg, contract.key_block)
    programs = Programs(model, contract, progress)
    run = _Run(programs, {name: f for name, f in phases.items() if name != REFERENCE}, phases)
    ran: list[str] = []
    for number in range(trials):
        name = VARIANTS[number % len(VARIANTS)]
        leaves = programs.leaves_of(variant(model, name))
        # Repeated ids let keys tie by themselves too.
        letters = 2 if name == "ties" else None
        trial = Trial.draw(programs, leaves, sizes, (seed, number), alphabet=letters)
        progress(f"trial {number + 1} of {trials}: {name}")
        run.compare(trial, {"trial": number, "variant": name}, layered=name not in ran)
        if name not in ran:
            ran.append(name)
    progress("control: native numerics")
    control_programs, control = _control(model, sizes, seed, contract, progress)
    facts = {
        "variants": ran,
        "sequences_per_trial": sizes.n_sequences,
        "longest_sequence": sizes.capacity,
        "index_topk": model.cfg.index_topk,
        "seed": seed,
        "programs": programs.n_programs + control_programs.n_programs,
        "compile_seconds": round(programs.compile_seconds + control_programs.compile_seconds, 2),
        "seconds": round(time.perf_counter() - began, 2),
    }
    return Invariance(
        contract=contract,
        dtype=model.cfg.dtype,
        trials=trials,
        phases=run.counts,
        layered=run.layered,
        first_unequal=run.first,
        control_unequal=control,
        facts=facts,
        finite=run.finite,
    )


class _Run:
    """Counts of one check so far."""

    def __init__(self, programs: Programs, others: Mapping[str, Phase], known: Mapping[str, Phase]):
        self._programs, self._others, self._known = programs, others, known
        self.counts = {name: Count() for name in others}
        self.layered = Count()
        self.first: dict[str, Any] | None = None
        self.finite = True

    def compare(self, trial: Trial, where: dict[str, Any], *, layered: bool) -> None:
        """Compares every phase of a trial with the reference."""
        reference = self._known[REFERENCE](trial)
        for name, phase in self._others.items():
            self._compare(trial, name, phase(trial), reference, where)
        names = [name for name in LAYERED if name in self._others]
        if not layered or not names:
            return
        part = dataclasses.replace(trial, sequences=trial.sequences[:N_LAYERED], keep=LAYER_OUT)
        reference = self._known[REFERENCE](part)
        for name in names:
            differs_n = self._compare(part, name, self._known[name](part), reference, where)
            self.layered.add(differs_n)

    def _compare(
        self,
        trial: Trial,
        name: str,
        found: Observations,
        reference: Observations,
        where: dict[str, Any],
    ) -> np.ndarray:
        self.finite = self.finite and found.finite and reference.finite
        unequal = found.unequal(reference)
        differs_n = np.logical_or.reduce(list(unequal.values()))
        self.counts[name].add(differs_n)
        if differs_n.any() and self.first is None:
            located = bisect(trial, (REFERENCE, name), known=self._known).first
            if located is None:
                row = np.flatnonzero(differs_n)[np.argmin(found.position_n[differs_n])]
                region = UNLOCATED if unequal[HIDDEN].any() else "head"
                token = int(found.sequence_n[row]), int(found.position_n[row])
                located = FirstUnequal(None, region, *token, (REFERENCE, name))
            self.first = {**located.to_json(), **where}
        return differs_n


def _control(
    model: GlmModel, sizes: Sizes, seed: int, contract: NumericsContract, progress: Notice
) -> tuple[Programs, int]:
    """Unequal tokens of native arithmetic, between the reference and decoding."""
    native = dataclasses.replace(contract, mode="native")
    programs = Programs(model, native, progress)
    trial = Trial.draw(programs, programs.leaves_of(model), sizes, (seed, 0))
    trial = dataclasses.replace(trial, sequences=trial.sequences[:N_CONTROL])
    unequal = PHASES["decode"](trial).unequal(PHASES[REFERENCE](trial))
    return programs, int(np.logical_or.reduce(list(unequal.values())).sum())
