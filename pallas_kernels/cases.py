"""What an operation is to those who test, compile and time it: parts, and the shapes to try."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from pallas_kernels.backend import Backend, Kind

EPS = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Relative error of one rounding."""

SPREAD = 6
"""Drawn numbers are normal ones times 2^-6 to 2^6, so that another order of a sum shows."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape. Sizes go by the shape letters of docs/architecture.md."""

    name: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    tags: frozenset[str] = frozenset()
    """`test`: small, run on a CPU, and `more` of them for the slow suite; `rows`: the shape whose
    number of rows is varied; `glm-5.2`: a real shape, compiled and timed only."""

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]

    def replace(self, **sizes: int) -> "Case":
        """The same case with other sizes."""
        return dataclasses.replace(self, sizes=tuple({**dict(self.sizes), **sizes}.items()))

    def __str__(self) -> str:
        sizes = " ".join(f"{letter}{size}" for letter, size in self.sizes)
        return f"{self.name} {self.dtype} {sizes}"


def case(name: str, dtype: str, *tags: str, **sizes: int) -> Case:
    """A case from its sizes."""
    return Case(name, dtype, tuple(sizes.items()), frozenset(tags))


class Bounded(NamedTuple):
    """What is right in f64, and how far from it a result may lie, by element."""

    value: np.ndarray
    bound: np.ndarray


class Cost(NamedTuple):
    """What the work must take at least."""

    flops: int
    n_bytes: int
    """Read and written once each."""


Draw = Callable[[Case, np.random.Generator], tuple[np.ndarray, ...]]
"""Arrays of a case."""
Run = Callable[[Case, Backend], Callable[..., Any]]
"""A case on a backend -> a function of its arrays."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The forward of an operation, or one of its gradients."""

    name: str
    kinds: tuple[Kind, ...]
    inputs: Callable[[Case], tuple[jax.ShapeDtypeStruct, ...]]
    run: Run
    reference: Callable[..., tuple[Bounded, ...]]
    """`(case, *arrays in f64)` -> what is right, for each result."""
    cost: Callable[[Case], Cost]
    mutation: Callable[[Case], Callable[..., Any]]
    """The same sum in another order: tests assert that its bits differ."""
    by_row: tuple[int, ...] = ()
    """Inputs whose first axis is rows that do not see each other; the results' is then too."""
    row_letter: str = "M"
    gpu_interpreted: bool = True
    """Whether the interpreter of Mosaic GPU multiplies what the twin multiplies; it copies a
    transposed operand, which is another product to XLA's CPU backend."""
    draw: Draw | None = None
    """Default: normal numbers with exponents spread by SPREAD."""

    def arrays(self, case: Case, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Operands that show a change of order."""
        if self.draw is not None:
            return self.draw(case, rng)
        return tuple(spread(rng, s.shape, s.dtype.name) for s in self.inputs(case))


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation: its parts and the shapes to try them at."""

    name: str
    parts: tuple[Part, ...]
    cases: tuple[Case, ...]

    def tagged(self, tag: str) -> tuple[Case, ...]:
        """The cases with a tag."""
        return tuple(case for case in self.cases if tag in case.tags)

    @property
    def kinds(self) -> Mapping[str, tuple[Kind, ...]]:
        """What each part can run on."""
        return {part.name: part.kinds for part in self.parts}


def struct(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an input."""
    return jax.ShapeDtypeStruct(shape, np.dtype(_DTYPES.get(dtype, dtype)))


def spread(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers times powers of two, in a dtype."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-SPREAD, SPREAD + 1, shape)
    return values.astype(np.float32).astype(_DTYPES.get(dtype, dtype))


_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}
