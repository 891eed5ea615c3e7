"""Proof on the user's machine that a token's numbers do not depend on how it was computed."""

from glm_jax.invariance.bisection import Bisection, bisect, bisect_model
from glm_jax.invariance.check import Invariance, check_invariance
from glm_jax.invariance.needle import NeedleResult, needle_trials
from glm_jax.invariance.phases import PHASES, REFERENCE
from glm_jax.invariance.variants import VARIANTS, variant

__all__ = [
    "PHASES",
    "REFERENCE",
    "VARIANTS",
    "Bisection",
    "Invariance",
    "NeedleResult",
    "bisect",
    "bisect_model",
    "check_invariance",
    "needle_trials",
    "variant",
]
