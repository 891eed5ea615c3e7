"""Size and speed of weight deltas: our levels beside other formats, in one run."""

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from glm_jax.bench.delta_formats import Format, formats
from glm_jax.bench.delta_weights import CASES, Case, weights
from glm_jax.bench.device import device
from glm_jax.errors import GlmError

_STEP_RANGE = 1 << 17


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaBench:
    """What is measured."""

    vocab: int = 1024
    n_layers: int = 1
    repeats: int = 3
    """Rounds; the fastest of each tensor counts, so that a disturbed one does not."""
    seed: int = 0

    def __post_init__(self):
        for field in ("vocab", "n_layers", "repeats"):
            if (value := getattr(self, field)) < 1:
                option = {"n_layers": "layers"}.get(field, field)
                raise GlmError(f"--{option} {value}: must be positive")


class _Totals:
    """Sums over the tensors of a case."""

    def __init__(self):
        self.n_bytes = 0
        self.seconds: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        self.sizes: Counter[str] = Counter()
        self.steps: Counter[int] = Counter()
        """Elements by old exponent and step."""

    def add(self, name: str, form: Format, old: np.ndarray, new: np.ndarray, repeats: int) -> None:
        times: dict[str, list[np.ndarray]] = {"encode": [], "apply": []}
        delta = found = None
        for _ in range(repeats):
            start = _clocks()
            delta = form.encode(old, new)
            middle = _clocks()
            found = form.apply(old, delta)
            times["encode"].append(middle - start)
            times["apply"].append(_clocks() - middle)
        if found is None or found.tobytes() != new.tobytes():
            raise AssertionError(f"{name}: the applied delta gives other bits")
        self.sizes[name] += form.size(delta)
        for what, taken in times.items():
            wall_s, cpu_s = np.min(taken, axis=0)
            self.seconds[name, what, "s"] += float(wall_s)
            self.seconds[name, what, "cpu_s"] += float(cpu_s)

    def count(self, old: np.ndarray, new: np.ndarray) -> None:
        self.n_bytes += old.nbytes
        exponents = (old >> 7 & 255).astype(np.int64)
        steps = new.astype(np.int64) - old
        keys, counts = np.unique(exponents * _STEP_RANGE + steps % _STEP_RANGE, return_counts=True)
        self.steps.update(dict(zip(keys.tolist(), counts.tolist(), strict=True)))

    def floors(self) -> dict[str, float]:
        """Percent of the bytes: entropy of the step, without and with the old exponent known."""
        keys = np.array(list(self.steps))
        counts = np.array(list(self.steps.values()))
        steps = np.unique(keys % _STEP_RANGE, return_inverse=True)[1]
        exponents = np.unique(keys // _STEP_RANGE, return_inverse=True)[1]
        alone = np.bincount(steps, counts)
        memoryless = (alone * np.log2(alone.sum() / alone)).sum()
        given = (counts * np.log2(np.bincount(exponents, counts)[exponents] / counts)).sum()
        percent = 100 / (8 * self.n_bytes)
        return {
            "changed": 100 * counts[keys % _STEP_RANGE > 0].sum() / counts.sum(),
            "entropy": memoryless * percent,
            "entropy_given_exponent": given * percent,
        }

    def to_json(self) -> dict[str, Any]:
        megabytes = self.n_bytes / 1e6
        floors = {name: float(value) for name, value in self.floors().items()}
        floor = floors["entropy_given_exponent"]
        return floors | {
            "formats": {
                name: {
                    "size": 100 * size / self.n_bytes,
                    "size_over_floor": 100 * size / self.n_bytes / floor,
                }
                | {
                    f"{what}_mb_per_{unit}": megabytes / self.seconds[name, what, unit]
                    for what in ("encode", "apply")
                    for unit in ("s", "cpu_s")
                }
                for name, size in self.sizes.items()
            }
        }


def _clocks() -> np.ndarray:
    """Seconds that passed and, steadier where others use the CPUs too, seconds of CPU."""
    return np.array([time.perf_counter(), time.process_time()])


def bench_delta(
    bench: DeltaBench, *, progress: Callable[[str], None] = lambda step: None
) -> dict[str, Any]:
    """Measures every format on every case; sizes and shares are in percent of the weights' bytes.

    One thread. Every applied delta is compared with the new weights.
    """
    measured_on, chosen = device(), formats()
    totals: dict[Case, _Totals] = {case: _Totals() for case in CASES}
    small = np.arange(5000, dtype=np.uint16)
    for form in chosen.values():  # compiles, or loads what was compiled before
        form.apply(small, form.encode(small, small + small % 2))
    for name, old, updated in weights(bench.vocab, bench.n_layers, seed=bench.seed):
        progress(name)
        words = old.reshape(-1).view(np.uint16)
        for case, new in updated.items():
            changed = new.reshape(-1).view(np.uint16)
            totals[case].count(words, changed)
            for label, form in chosen.items():
                totals[case].add(label, form, words, changed, bench.repeats)
    return {
        "vocab": bench.vocab,
        "layers": bench.n_layers,
        "elements": totals[CASES[0]].n_bytes // 2,
        "repeats": bench.repeats,
        "device": measured_on,
        "versions": {name: version(name) for name in ("glm-jax", "numpy", "numba", "zstandard")},
        "results": {str(case): total.to_json() for case, total in totals.items()},
    }
