"""Deltas stay near the entropy where zstd by itself would not."""

import ml_dtypes
import numpy as np
import pytest

from glm_jax.checkpoint.delta import symbols
from glm_jax.checkpoint.delta.codec import apply, encode


def entropy_bytes(values):
    counts = np.unique(values, return_counts=True)[1]
    return (counts * np.log2(values.size / counts)).sum() / 8


@pytest.mark.parametrize("share", [0.3, 0.45, 0.6])
def test_frequent_small_steps_take_little_more_than_their_entropy(rng, share):
    # One exponent; of bytes with so few values, zstd takes repeats by chance for structure.
    old = np.full(5024, 0x3F40, np.uint16)
    steps = rng.choice([-1, 1], old.size) * (rng.random(old.size) < share)
    new = (old.astype(np.int64) + steps).astype(np.uint16)
    as_weights = [x.view(ml_dtypes.bfloat16) for x in (old, new)]
    delta = encode(*as_weights)
    assert np.array_equal(apply(as_weights[0], delta).view(np.uint16), new)
    assert len(delta) < 1.09 * entropy_bytes(steps) + 100


def test_pieces_are_cut_where_a_table_of_their_own_pays(rng):
    few, many = (rng.integers(0, n, 2000).astype(np.uint8) for n in (4, 64))
    for parts, expected in (
        ([few, many], [2000]),
        ([few, few, many, many], [4000]),
        ([few[:1000], few[1000:]], []),
        ([few, few[:8], few], []),
        ([few[:0], few, few[:0]], []),
    ):
        ends = np.cumsum([part.size for part in parts])
        assert symbols.cuts(np.concatenate(parts), ends).tolist() == expected
