"""Segments reproduce the layers they were cut from, with few bodies to trace."""

import itertools

import pytest

from glm_jax.model.layout import segments
from glm_jax.presets import PRESETS, preset

DENSE, FULL, SHARED = ("dense", "full"), ("sparse", "full"), ("sparse", "shared")
KINDS = (DENSE, FULL, SHARED, ("dense", "shared"))


def unrolled(layouts):
    """The layer kinds, in the order of the layer numbers that the segments give them."""
    layers = {}
    for layout in layouts:
        for repeat, position in itertools.product(
            range(layout.repeats), range(len(layout.pattern))
        ):
            number = layout.layer(repeat, position)
            assert number not in layers
            layers[number] = layout.pattern[position]
    assert list(layers) == list(range(len(layers)))
    return tuple(layers.values())


def bodies(layouts):
    return sum(len(layout.pattern) for layout in layouts)


def test_glm_5_2_has_six_bodies():
    layouts = segments(preset("glm-5.2").layer_kinds)
    assert [(x.pattern, x.repeats, x.first_layer) for x in layouts] == [
        ((DENSE,), 3, 0),
        ((SHARED,), 3, 3),
        ((FULL, SHARED, SHARED, SHARED), 18, 6),
    ]
    assert bodies(layouts) == 6


def test_glm_5_has_two_bodies():
    layouts = segments(preset("glm-5").layer_kinds)
    assert [(x.pattern, x.repeats) for x in layouts] == [((DENSE,), 3), ((FULL,), 75)]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_unroll_to_their_layers(name):
    kinds = preset(name).layer_kinds
    assert unrolled(segments(kinds)) == kinds


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        ((), 0),
        ((FULL,), 1),
        ((DENSE,) * 100, 1),
        ((FULL, SHARED) * 50, 2),
        ((FULL, SHARED) * 50 + (FULL,), 3),
        ((DENSE, FULL, SHARED, DENSE, FULL, FULL), 5),
        ((FULL, SHARED, SHARED) * 2 + (FULL, SHARED) * 2, 5),
        (tuple(KINDS[(i * i) % 4] for i in range(40)), 2),
    ],
)
def test_awkward_lists(kinds, count):
    layouts = segments(kinds)
    assert unrolled(layouts) == kinds
    assert bodies(layouts) == count
    assert sum(x.n_layers for x in layouts) == len(kinds)


@pytest.mark.parametrize("n_kinds", [1, 2, 3, 4])
def test_random_lists_unroll_to_themselves(n_kinds, rng):
    for _ in range(60):
        picks = rng.integers(n_kinds, size=rng.integers(1, 24))
        kinds = tuple(KINDS[i] for i in picks)
        layouts = segments(kinds)
        assert unrolled(layouts) == kinds
        runs = sum(1 for _ in itertools.groupby(kinds))
        assert bodies(layouts) <= runs  # cutting into runs is one way to do it
