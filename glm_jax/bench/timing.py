"""The clock: tasks measured in turn, A B C A B C, so that a slow minute slows all of them."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of one task."""

    wall_s: float
    """Seconds that passed."""
    cpu_s: float
    """Seconds of CPU, all threads of the measured process together: on a machine that others use
    too, the steadier of the two."""


type Task = Callable[[], Sample]


def clocked(run: Callable[[], Any]) -> Task:
    """A task that measures `run`, until the arrays it returns are ready."""

    def task() -> Sample:
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(run())
        return Sample(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)

    return task


def interleaved(
    tasks: Mapping[str, Task],
    repeats: int,
    *,
    warm_up: int = 1,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, list[Sample]]:
    """Runs every task once a round, in order, and keeps the samples of the rounds after warm-up.

    Args:
        tasks: name to task. Sample i of one task and sample i of another are neighbours in time,
            so their ratio is a fair one.
        repeats: rounds that count.
        warm_up: rounds before them, in which programs are compiled and pages touched.
        progress: called after each round with the rounds done and the rounds in all.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in tasks}
    for i in range(warm_up + repeats):
        for name, task in tasks.items():
            sample = task()
            if i >= warm_up:
                samples[name].append(sample)
        progress(i + 1, warm_up + repeats)
    return samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Middle and ends of a few figures."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, figures: Iterable[float]) -> "Spread":
        """The spread of at least one figure."""
        figures = list(figures)
        return cls(median=statistics.median(figures), min=min(figures), max=max(figures))


def median_wall_s(samples: Iterable[Sample]) -> float:
    """Median of the seconds that passed."""
    return statistics.median(x.wall_s for x in samples)


def median_cpu_s(samples: Iterable[Sample]) -> float:
    """Median of the seconds of CPU."""
    return statistics.median(x.cpu_s for x in samples)
