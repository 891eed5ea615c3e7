"""The verdict: every comparison made, and its summary as JSON."""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from glm_jax.parity.names import PARTS, Part

Form = Literal["masked", "gathered", "pinned"]
"""How a value is computed.

Native arithmetic, with attention over all keys under a mask, or over each row's own list; or pinned
arithmetic through the cache, which is how the engine runs.
"""

FORMS: tuple[Form, ...] = ("masked", "gathered", "pinned")

EpsSource = Literal["option", "meta.json", "config.json"]

MAX_ABS, MAX_RELATIVE = 5e-4, 1e-4

GROUPS: dict[str, tuple[str, float]] = {
    "logits": ("logits, max abs", MAX_ABS),
    "layers": ("values of each layer, max abs", MAX_ABS),
    "index_sets": ("selected index sets, most rows that differ", 0),
    "routes": ("routes, most tokens that differ", 0),
    "decode": ("logits token by token, max abs", MAX_ABS),
    "mtp": ("MTP values and logits, max abs", MAX_ABS),
    "loss": ("loss, relative", MAX_RELATIVE),
    "grad_norms": ("gradient norms, relative", MAX_RELATIVE),
    "grads": ("whole gradients, relative in L2", MAX_RELATIVE),
}
"""What each group of arrays measures, and the bound on it."""


def group_of(name: str) -> str:
    """The group in which an array is judged."""
    head, _, tail = name.partition(".")
    if tail == "selected" or tail == "router_experts":
        return "index_sets" if tail == "selected" else "routes"
    heads = {"logits_decode": "decode", "gradnorm": "grad_norms", "grad": "grads"}
    heads |= {name: name for name in ("logits", "mtp", "loss")}
    return heads.get(head, "layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One array of the reference against ours, in one form."""

    name: str
    form: Form
    group: str
    value: float
    """The group's measure; NaN or infinite where the arrays cannot be subtracted."""

    @property
    def tolerance(self) -> float:
        """Largest value that passes."""
        return GROUPS[self.group][1]

    @property
    def ok(self) -> bool:
        """Whether the array agrees; a NaN never does."""
        return self.value <= self.tolerance

    @property
    def label(self) -> str:
        """Name and form, for a reader."""
        return f"{self.name} ({self.form})"

    @property
    def severity(self) -> float:
        """For sorting: value over tolerance, infinite for a NaN and for a set that differs."""
        if self.tolerance == 0:
            return math.inf if self.value > 0 else 0.0
        return math.inf if math.isnan(self.value) else self.value / self.tolerance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """All comparisons with one measure and one bound."""

    name: str
    title: str
    tolerance: float
    arrays: int
    """Arrays of the reference in the group; 0 if it has none."""
    value: float | None
    """Largest difference (for sets and routes: how many rows differ); None without arrays."""
    ok: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Outcome of `check_parity`. The properties named like a JSON key hold its value."""

    comparisons: tuple[Comparison, ...]
    """In the order in which the model computes the arrays."""
    latent_norm_eps: float
    """eps of the latent norms that was used."""
    latent_norm_eps_from: EpsSource
    prefill: int
    """Tokens read at once before decoding."""
    absent: tuple[str, ...]
    """Arrays the checkpoint could be compared with, but the reference does not have."""
    parts: tuple[Part, ...] = PARTS
    forms: tuple[Form, ...] = FORMS

    @property
    def ok(self) -> bool:
        """Whether every array agrees within its bound."""
        return bool(self.comparisons) and all(x.ok for x in self.comparisons)

    @property
    def max_abs_logit_diff(self) -> float | None:
        """Largest difference of a logit of the prompt, in any form."""
        return self.group("logits").value

    @property
    def index_sets_equal(self) -> bool | None:
        """Whether every row selects the reference's keys; None if the reference has no sets."""
        group = self.group("index_sets")
        return group.ok if group.arrays else None

    @property
    def routes_equal(self) -> bool | None:
        """Whether every token goes to the reference's experts; None if the reference has none."""
        group = self.group("routes")
        return group.ok if group.arrays else None

    @property
    def decode_max_abs(self) -> float | None:
        """Largest difference of a logit computed token by token, through the cache."""
        return self.group("decode").value

    @property
    def mtp_max_abs(self) -> float | None:
        """Largest difference of a value or logit of the draft layer."""
        return self.group("mtp").value

    @property
    def grad_norm_max_rel(self) -> float | None:
        """Largest relative difference of a gradient's norm; None if the reference has none."""
        return self.group("grad_norms").value

    @property
    def failures(self) -> tuple[Comparison, ...]:
        """What is out of bounds, in the order of computing: the first is where to look."""
        return tuple(x for x in self.comparisons if not x.ok)

    @property
    def worst(self) -> Comparison | None:
        """The comparison closest to its bound, or furthest past it."""
        return max(self.comparisons, key=lambda x: x.severity, default=None)

    def group(self, name: str) -> Group:
        """The summary of one group; see `GROUPS` for the names."""
        title, tolerance = GROUPS[name]
        mine = [x for x in self.comparisons if x.group == name]
        # np.max keeps a NaN; Python's max may lose it.
        value = float(np.max([x.value for x in mine])) if mine else None
        names = {x.name for x in mine}
        ok = all(x.ok for x in mine)
        return Group(
            name=name, title=title, tolerance=tolerance, arrays=len(names), value=value, ok=ok
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready summary.

        A difference is null where the reference has no such array (`absent` says which) and where
        it is not a finite number (`not_finite` says which; `ok` is then false).
        """
        worst = self.worst
        return {
            "max_abs_logit_diff": _finite(self.max_abs_logit_diff),
            "index_sets_equal": self.index_sets_equal,
            "routes_equal": self.routes_equal,
            "decode_max_abs": _finite(self.decode_max_abs),
            "mtp_max_abs": _finite(self.mtp_max_abs),
            "grad_norm_max_rel": _finite(self.grad_norm_max_rel),
            "ok": self.ok,
            "layer_max_abs": _finite(self.group("layers").value),
            "loss_rel": _finite(self.group("loss").value),
            "grad_max_rel": _finite(self.group("grads").value),
            "worst": worst
            and {
                "name": worst.label,
                "value": _finite(worst.value),
                "tolerance": worst.tolerance,
            },
            "compared": len({x.name for x in self.comparisons}),
            "failures": [x.label for x in self.failures],
            "not_finite": [x.label for x in self.failures if not math.isfinite(x.value)],
            "absent": list(self.absent),
            "latent_norm_eps": self.latent_norm_eps,
            "latent_norm_eps_from": self.latent_norm_eps_from,
            "prefill": self.prefill,
            "parts": list(self.parts),
            "forms": list(self.forms),
        }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
