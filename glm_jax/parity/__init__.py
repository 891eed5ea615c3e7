"""Comparison of a checkpoint, run by this model, with the arrays of a reference file."""

from glm_jax.parity.check import check_model, check_parity
from glm_jax.parity.reference import Reference
from glm_jax.parity.report import Comparison, Group, ParityReport

__all__ = ["Comparison", "Group", "ParityReport", "Reference", "check_model", "check_parity"]
