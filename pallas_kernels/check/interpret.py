"""A kernel in interpret mode against the XLA twin, in bits."""

import dataclasses
from typing import Any

import jax
import numpy as np

from pallas_kernels.backend import INTERPRET, XLA, Backend
from pallas_kernels.cases import Case, Part


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """One shape."""

    case: str
    elements: int
    unequal: int

    @property
    def ok(self) -> bool:
        """Whether all bits are equal."""
        return self.unequal == 0

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**dataclasses.asdict(self), "ok": self.ok}


def interpret(part: Part, case: Case, seed: int = 0, backend: Backend = INTERPRET) -> Interpreted:
    """Runs one shape both ways on this machine's CPU and counts the elements that differ."""
    arrays = part.arrays(case, np.random.default_rng(seed))
    twin, kernel = (
        [np.asarray(x) for x in jax.tree.leaves(jax.jit(part.run(case, which))(*arrays))]
        for which in (XLA, backend)
    )
    unequal = elements = 0
    for a, b in zip(twin, kernel, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise AssertionError(f"{part.name} {case}: {a.dtype}{a.shape}, {b.dtype}{b.shape}")
        # Bytes, so that NaN equals itself and -0 differs from +0.
        unequal += int((_bytes(a) != _bytes(b)).any(axis=-1).sum())
        elements += a.size
    return Interpreted(str(case), elements, unequal)


def _bytes(a: np.ndarray) -> np.ndarray:
    return np.frombuffer(a.tobytes(), np.uint8).reshape(-1, a.dtype.itemsize)
