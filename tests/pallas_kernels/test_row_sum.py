"""Row sums are the balanced tree of additions, to the bit, in whatever they are compiled with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_sum import row_sum

WIDTHS = (1, 2, 3, 7, 16, 40, 64, 192, 256, 528)


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def spread(rng, *shape) -> np.ndarray:
    """Exponents over +-12: a sum in another order has other bits."""
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 13, shape)).astype(np.float32)


def tree(x_RK: np.ndarray) -> np.ndarray:
    """The definition, padded to a power of two, one addition at a time."""
    width = 1 << (x_RK.shape[1] - 1).bit_length()
    x_RK = np.pad(x_RK, ((0, 0), (0, width - x_RK.shape[1])))
    while x_RK.shape[1] > 1:
        half = x_RK.shape[1] // 2
        x_RK = x_RK[:, :half] + x_RK[:, half:]
    return x_RK


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_sum_is_its_tree(rng, width):
    x_RK = spread(rng, 300, width)
    for rows in (1, 8, 37, 300):
        np.testing.assert_array_equal(bits(jax.jit(row_sum)(x_RK[:rows])), bits(tree(x_RK[:rows])))


@pytest.mark.parametrize("width", WIDTHS)
def test_products_are_rounded_before_they_are_added(rng, width):
    x_RK, y_RK = spread(rng, 300, width), spread(rng, 300, width)
    expected = tree(x_RK * y_RK)

    @jax.jit
    def used(x, y):  # sums that share their loop with what is made of them
        return x * jax.lax.rsqrt(1 + row_sum(x * x)), row_sum(x * y)

    for rows in (8, 64, 300):
        np.testing.assert_array_equal(
            bits(used(x_RK[:rows], y_RK[:rows])[1]), bits(expected[:rows])
        )


def test_zeros_behind_a_row_change_no_bit(rng):
    x_RK = spread(rng, 16, 70)
    x_RK[:, 5] = -0.0
    long = np.pad(x_RK, ((0, 0), (0, 200)))
    np.testing.assert_array_equal(bits(row_sum(x_RK)), bits(row_sum(long)))
    long[:, 70:] = -0.0
    np.testing.assert_array_equal(bits(row_sum(x_RK)), bits(row_sum(long)))


def test_another_order_would_be_seen(rng):
    x_RK = spread(rng, 64, 256)
    serial = functools.reduce(np.add, x_RK.T)[:, None]
    for other in (serial, tree(x_RK[:, ::-1][:, rng.permutation(256)])):
        assert (bits(other) != bits(tree(x_RK))).mean() > 0.3


def test_what_is_not_finite_arrives():
    x_RK = np.zeros((4, 40), np.float32)
    x_RK[0, 3], x_RK[1, 3], x_RK[2, 3] = np.nan, np.inf, -np.inf
    total = np.asarray(jax.jit(row_sum)(x_RK))[:, 0]
    assert np.isnan(total[0])
    assert list(total[1:]) == [np.inf, -np.inf, 0.0]


def test_no_columns_sum_to_zero():
    assert np.asarray(row_sum(jnp.zeros((3, 0)))).tolist() == [[0.0]] * 3


def test_the_gradient_of_a_sum_is_that_of_each_term(rng):
    x_RK, d_R1 = spread(rng, 8, 40), spread(rng, 8, 1)
    x_RK[:, :3] = 0.0
    _, pull = jax.vjp(row_sum, jnp.asarray(x_RK))
    np.testing.assert_array_equal(pull(jnp.asarray(d_R1))[0], np.broadcast_to(d_R1, x_RK.shape))
