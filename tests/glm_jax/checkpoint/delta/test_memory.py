"""Both directions hold a few tensors at a time, however many there are."""

import tracemalloc
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from glm_jax.checkpoint.delta.arc_v2 import ArcV2, write_arc_v2
from glm_jax.checkpoint.delta.store import DeltaStore

N_TENSORS, N = 24, 1 << 17


class Made(Mapping[str, np.ndarray]):
    """Weights that are made when asked for."""

    def __init__(self, step: int):
        self.step = step

    def __getitem__(self, name: str) -> np.ndarray:
        array = np.full(N, int(name), np.int16)
        array[: 977 * self.step : 977] += np.int16(1)
        return array

    def __iter__(self) -> Iterator[str]:
        return map(str, range(N_TENSORS))

    def __len__(self) -> int:
        return N_TENSORS


def peak(work: Callable[[], object]) -> float:
    """In tensors."""
    work_before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    work()
    return (tracemalloc.get_traced_memory()[1] - work_before) / (2 * N)


def test_saving_and_applying_hold_a_few_tensors(tmp_path):
    chain = DeltaStore(tmp_path / "store", n_threads=1)
    warm = DeltaStore(tmp_path / "warm")  # loads compiled code, whose objects would count
    for step in range(3):
        warm.save(Made(step))
    tracemalloc.start()
    try:
        found = {
            "full": peak(lambda: chain.save(Made(0))),
            "delta": peak(lambda: chain.save(Made(1))),
            "of given weights": peak(lambda: chain.save(Made(2), Made(1))),
            "verify": peak(lambda: chain.verify()),
            "arc_v2": peak(lambda: write_arc_v2(tmp_path / "d", Made(0), Made(1))),
            "from arc_v2": peak(lambda: chain.save(ArcV2(Made(2), tmp_path / "d2"), full=True))
            if write_arc_v2(tmp_path / "d2", Made(2), Made(3))
            else 0,
        }
        control = peak(chain.read)
    finally:
        tracemalloc.stop()
    # Working arrays of the scans count as if all of them were touched: 3 for each element.
    assert max(found.values()) < 8, found
    assert control > N_TENSORS
