"""The delta bench: weights as described, formats exact, our sizes below all others'."""

import numpy as np
import pytest

from glm_jax.bench import delta_weights
from glm_jax.bench.delta import DeltaBench, bench_delta
from glm_jax.bench.delta_formats import formats
from glm_jax.bench.delta_weights import CASES, Case
from glm_jax.errors import GlmError
from tests.glm_jax.checkpoint.delta.arrays import updated


@pytest.fixture(scope="module")
def figures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_weights, "shapes", lambda vocab, n: {"lm_head": (vocab, 2048)})
        return bench_delta(DeltaBench(vocab=512, repeats=1))


def test_small_is_near_the_entropy_given_the_exponent(figures):
    """At a million elements tables weigh more than at the size that the targets are set for."""
    for case in (Case("new", 1e-6, 1), Case("new", 5e-6, 1)):
        result = figures["results"][str(case)]
        assert 1.0 < result["formats"]["small"]["size_over_floor"] < 1.15
        assert result["entropy_given_exponent"] < 0.9 * result["entropy"]


def test_ours_is_smaller_than_every_other_format_in_every_case(figures):
    assert len(figures["results"]) == len(CASES)
    for case, result in figures["results"].items():
        sizes = {name: x["size"] for name, x in result["formats"].items()}
        small = sizes.pop("small")
        assert small < min(sizes.values()), case
        fast = sizes.pop("fast")
        assert fast < min(sizes["xor_zstd1"], sizes["planes_zstd1"]), case


def test_more_learning_rate_changes_more(figures):
    changed = [figures["results"][str(Case("new", lr, 1))]["changed"] for lr in (1e-6, 5e-6, 1e-5)]
    assert changed == sorted(changed) and 0.5 < changed[0] < 3
    assert figures["results"][str(Case("cold", 1e-6, 1))]["changed"] < changed[0]


@pytest.mark.parametrize("lr", [0.0, 1e-7, 1e-5, 1e-2])
def test_every_format_gives_the_same_bits_back(rng, lr):
    old, new = (x.reshape(-1).view(np.uint16) for x in updated(rng, (70_000,), lr))
    for form in formats().values():
        assert form.apply(old, form.encode(old, new)).tobytes() == new.tobytes()


def test_a_size_that_is_not_positive_is_named():
    with pytest.raises(GlmError, match="--layers 0: must be positive"):
        DeltaBench(n_layers=0)
