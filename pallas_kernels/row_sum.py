"""Sums of rows in a fixed tree of additions."""

import jax
import jax.numpy as jnp


def row_sum(x_RK: jax.Array) -> jax.Array:
    """Sum of each row in its own dtype, `[R, K] -> [R, 1]`; no columns sum to 0.

    Halves are added until one column is left: `x[:, :h] + x[:, h:]` with h the largest power of two
    below K, a column without a partner passing unchanged. So a row equals the same row with zeros
    behind it. Each addition is an operation of its own, which no compiler reorders: a reduction's
    order is XLA's choice and changes with the number of rows, that of a product of few columns
    changes on some CPUs (docs/numerics.md).
    """
    return _summed(x_RK)


@jax.custom_vjp
def _summed(x_RK: jax.Array) -> jax.Array:
    return _fold(x_RK)


def rounded(x: jax.Array) -> jax.Array:
    """A product whose addend sees it rounded; -0 becomes +0, all else stays.

    A multiplication and an addition that meet in one loop are contracted into one rounding. The
    select between them keeps two, whatever is compiled together.
    """
    return jnp.where(x != 0, x, jnp.zeros((), x.dtype))


def _fold(x_RK: jax.Array) -> jax.Array:
    if x_RK.shape[1] == 0:
        return jnp.zeros((x_RK.shape[0], 1), x_RK.dtype)
    x_RK = rounded(x_RK)  # terms are often products
    while (width := x_RK.shape[1]) > 1:
        half = 1 << (width - 1).bit_length() - 1
        paired = width - half
        added = x_RK[:, :paired] + x_RK[:, half:]
        x_RK = jnp.concatenate([added, x_RK[:, paired:half]], 1) if paired < half else added
    return x_RK


def _forward(x_RK: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Only the shape is needed; an array of no rows carries it.
    return _fold(x_RK), x_RK[:0]


def _backward(empty_0K: jax.Array, d_R1: jax.Array) -> tuple[jax.Array]:
    return (jnp.broadcast_to(d_R1, (d_R1.shape[0], empty_0K.shape[1])),)


_summed.defvjp(_forward, _backward)
