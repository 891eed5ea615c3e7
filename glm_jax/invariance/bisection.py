"""Where two phases part: the first layer, region and token whose bits differ."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.invariance.observations import ALL_TAPS, HIDDEN, LOGPROB, REGIONS, Key
from glm_jax.invariance.phases import PHASES, Phase
from glm_jax.invariance.program import Notice, Programs
from glm_jax.invariance.trial import Sizes, Trial
from glm_jax.invariance.variants import variant
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract

FINAL_REGIONS = {HIDDEN: "final_norm", LOGPROB: "head"}
_REGION_OF_TAP = {tap: region for region, taps in REGIONS.items() for tap in taps}


class Part(NamedTuple):
    """A region of a layer; layer None is after the last one."""

    layer: int | None
    region: str


class FirstUnequal(NamedTuple):
    """The first value that differs, in order of positions, then of computation."""

    layer: int | None
    region: str
    sequence: int
    position: int
    phases: tuple[str, str]

    def to_json(self) -> dict[str, Any]:
        """As the report prints it."""
        return {
            "layer": self.layer,
            "region": self.region,
            "token": self.position,
            "phases": list(self.phases),
            "sequence": self.sequence,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bisection:
    """Unequal tokens of every region of every layer."""

    phases: tuple[str, str]
    n_tokens: int
    unequal: dict[Part, int]
    """In order of computation. Counts cascade: only the first can be a cause."""
    first: FirstUnequal | None

    def to_json(self) -> dict[str, Any]:
        """JSON with stable keys."""
        return {
            "phases": list(self.phases),
            "tokens": self.n_tokens,
            "first_unequal": None if self.first is None else self.first.to_json(),
            "regions": [
                {"layer": part.layer, "region": part.region, "unequal": count}
                for part, count in self.unequal.items()
            ],
        }


def bisect(
    trial: Trial, phases: tuple[str, str], *, known: Mapping[str, Phase] = PHASES
) -> Bisection:
    """Computes a trial in two phases with all intermediate values, and compares those.

    What is not among the values (index keys, the outputs of single experts) shows in the next
    region that reads it. The programs are not those without intermediate values: a difference that
    comes from fusion may be in one kind only.

    Args:
        trial: the sequences; the draws of a phase are the same as in a check.
        phases: names of the two phases; the first is the reference.
        known: the phases by name.
    """
    trial = dataclasses.replace(trial, keep=ALL_TAPS)
    reference, other = (known[name](trial) for name in phases)
    unequal = other.unequal(reference)
    by_part: dict[Part, np.ndarray] = {}
    for key, differs_n in unequal.items():
        part = part_of(trial.programs.cfg, key)
        by_part[part] = by_part.get(part, False) | differs_n
    first, any_n = None, np.logical_or.reduce(list(by_part.values()))
    if any_n.any():
        rows = np.flatnonzero(any_n)
        row = rows[np.lexsort((other.sequence_n[rows], other.position_n[rows]))[0]]
        layer, region = next(part for part, differs_n in by_part.items() if differs_n[row])
        where = int(other.sequence_n[row]), int(other.position_n[row])
        first = FirstUnequal(layer, region, *where, phases)
    return Bisection(
        phases=phases,
        n_tokens=other.n_tokens,
        unequal={part: int(differs_n.sum()) for part, differs_n in by_part.items()},
        first=first,
    )


def bisect_model(
    model: GlmModel,
    phases: Sequence[str],
    *,
    seed: int = 0,
    variant_name: str = "plain",
    contract: NumericsContract | None = None,
    notice: Notice = lambda _: None,
) -> Bisection:
    """Bisects random sequences under a model.

    Args:
        model: the parameters.
        phases: names of the two phases.
        seed: of the draws.
        variant_name: which change to the model.
        contract: the numerics (default: pinned).
        notice: called with what is compiled.

    Raises:
        GlmError: not two known phases, or an unknown variant.
    """
    pair = phase_pair(phases)
    contract = contract or NumericsContract()
    programs = Programs(model, contract, notice)
    leaves = programs.leaves_of(variant(model, variant_name))
    sizes = Sizes.of(model.cfg, contract.key_block)
    trial = Trial.draw(
        programs, leaves, sizes, (seed, 0), alphabet=2 if variant_name == "ties" else None
    )
    return bisect(trial, pair)


def phase_pair(names: Sequence[str]) -> tuple[str, str]:
    """Two phases by name. Raises `GlmError` for anything else."""
    phases = tuple(name.strip() for name in names)
    if len(phases) != 2 or not set(phases) <= set(PHASES):
        raise GlmError(f"phases {','.join(phases)!r}: give two of {', '.join(PHASES)}")
    return phases[0], phases[1]


def part_of(cfg: GlmConfig, key: Key) -> Part:
    """The region that computed a value."""
    if key.layer is None:
        return Part(None, FINAL_REGIONS[key])
    region = _REGION_OF_TAP.get(key.tap, key.tap)
    if region == "feed_forward":
        region = "combine" if cfg.mlp_layer_types[key.layer] == "sparse" else "mlp"
    return Part(key.layer, region)
