"""The tree of a sum is the one stated: neighbours pairwise, an odd one out passes up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree import tree_sum


def explicit(x):
    """The trees of one to eight leaves, written out."""
    a, b, c, d, e, f, g, h = [*x, *[None] * (8 - len(x))]
    return [
        lambda: a,
        lambda: a + b,
        lambda: (a + b) + c,
        lambda: (a + b) + (c + d),
        lambda: ((a + b) + (c + d)) + e,
        lambda: ((a + b) + (c + d)) + (e + f),
        lambda: ((a + b) + (c + d)) + ((e + f) + g),
        lambda: ((a + b) + (c + d)) + ((e + f) + (g + h)),
    ][len(x) - 1]()


def in_order(x):
    total = x[0]
    for leaf in x[1:]:
        total = total + leaf
    return total


def wide(rng, *shape):
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 13, shape)
    return values.astype(np.float32)


def bits(x):
    return np.asarray(x).view(np.uint32)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_tree_is_the_explicit_one(n, transform, rng):
    leaves = wide(rng, n, 400)
    got = transform(tree_sum)([jnp.asarray(leaf) for leaf in leaves])
    np.testing.assert_array_equal(bits(got), bits(explicit(leaves)))


@pytest.mark.parametrize("n", range(4, 9))
def test_another_order_gives_other_bits(n, rng):
    leaves = wide(rng, n, 400)
    got = bits(tree_sum([jnp.asarray(leaf) for leaf in leaves]))
    assert (got != bits(in_order(leaves))).any()
    assert (got != bits(tree_sum([jnp.asarray(leaf) for leaf in leaves[::-1]]))).any() == (
        n not in (4, 8)  # a full tree read backwards is itself
    )
    swapped = leaves[[0, 2, 1, *range(3, n)]]
    assert (got != bits(tree_sum([jnp.asarray(leaf) for leaf in swapped]))).any()


@pytest.mark.parametrize("n", range(1, 9))
def test_leaves_of_zeros_at_the_end_change_nothing(n, rng):
    leaves = [jnp.asarray(leaf) for leaf in wide(rng, n, 400)]
    padded = leaves + [jnp.zeros(400)] * (8 - n)
    np.testing.assert_array_equal(bits(tree_sum(leaves)), bits(tree_sum(padded)))


def test_no_leaves_are_an_error():
    with pytest.raises(ValueError, match="tree_sum: no leaves"):
        tree_sum([])
