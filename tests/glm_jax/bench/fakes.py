"""Programs and peers that take a given time, for tests of the figures."""

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp

from glm_jax.bench.gemm import GemmShape
from glm_jax.bench.program import MODES, Program
from glm_jax.bench.timing import Sample

SHAPES = (GemmShape(8, 8, 8), GemmShape(16, 4, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedProgram(Program):
    """A program that says it took the given seconds, twice as much CPU."""

    times: list[float]
    """Of the warm-up and the rounds after it; used up."""

    def task(self) -> Sample:
        s = self.times.pop(0)
        return Sample(wall_s=s, cpu_s=2 * s)


def fixed(mode: str, *times: float) -> FixedProgram:
    """A program of a mode; the warm-up's time is put before the given ones."""
    return FixedProgram(
        contract=MODES[mode](),
        compile_s=7.0,
        run=lambda: (jnp.zeros(1), None),
        times=[99.0, *times],
    )


class FakePeer:
    """A peer that takes the given seconds, and as much CPU."""

    def __init__(self, times: Iterable[float] = (3.0, 1.0, 4.0)):
        self.versions = {"torch": "9"}
        self.times = (99.0, *times)

    def task(self, dtype: str, *numbers: int):
        seconds = iter(self.times)
        return lambda: (lambda s: Sample(wall_s=s, cpu_s=s))(next(seconds))


def second_of_gemm(shape: GemmShape, dtype: str):
    """In place of `gemm`: each product takes 1 s and 1 s of CPU."""
    return lambda: Sample(wall_s=1.0, cpu_s=1.0)
