"""What a run's directory records, read back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from glm_jax.errors import GlmError
from rl.recipe_fields import read_toml
from rl.run_directory import (
    EVALUATION,
    METRICS,
    RECIPE,
    SAMPLES,
    SUMMARY,
    WARM_START,
    read_records,
)

type Records = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The records of a run, complete or not."""

    name: str
    path: Path
    recipe: dict[str, Any]
    """Dotted keys and values."""
    warm_start: Records
    steps: Records
    evaluation: Records
    samples: Records
    summary: dict[str, Any] | None

    def series(self, metric: str, records: Records | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Steps at which a metric was computed, and its values."""
        records = self.steps if records is None else records
        points = [(r["step"], r[metric]) for r in records if metric in r]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.asarray(steps, int), np.asarray(values, float)

    def total(self, metric: str) -> float | None:
        """Sum over steps; None if no step has the metric."""
        values = self.series(metric)[1]
        return float(values.sum()) if values.size else None


def read_run(path: str | Path) -> Run:
    """Reads a run's directory.

    Raises:
        GlmError: it is none.
    """
    path = Path(path).absolute()
    if not (path / RECIPE).is_file():
        raise GlmError(f"{path}: has no {RECIPE}; give the directory of a run")
    summary = path / SUMMARY
    return Run(
        path.name,
        path,
        read_toml(path / RECIPE),
        warm_start=read_records(path / WARM_START),
        steps=read_records(path / METRICS),
        evaluation=read_records(path / EVALUATION),
        samples=read_records(path / SAMPLES),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None,
    )
