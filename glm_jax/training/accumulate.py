"""Gradient sums in one fixed tree, however the work is cut.

A leaf is the gradient of one chunk of one sequence. Leaves arrive in canonical order and are added
like bits of a binary counter: two sums of equal size make one of twice the size. The result is the
balanced tree over all leaves (`pallas_kernels.tree.tree_sum`), whatever batches they came in; at
any time at most log2(n) partial sums are held.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def empty(shape: tuple[int, ...], n_levels: int, lead: tuple[int, ...] = ()) -> Array:
    """Zeroed levels `[*lead, n_levels, *shape]` for up to `2^n_levels - 1` leaves."""
    return jnp.zeros((*lead, n_levels, *shape), jnp.float32)


def push(levels: Any, count: Int[Array, ""], leaf: Any, at: tuple[Any, ...] = ()) -> Any:
    """Adds leaf number `count` (from 0) to the counter at the index `at` of the leading axes."""
    leaf = jax.tree.map(lambda x: x.astype(jnp.float32), leaf)

    def occupied(carry):
        level, _ = carry
        return (count >> level) & 1 == 1

    def merge(carry):
        level, value = carry

        def add(x, v):
            return _read(x, (*at, level), v.shape) + v

        return level + 1, jax.tree.map(add, levels, value)

    level, value = lax.while_loop(occupied, merge, (jnp.int32(0), leaf))
    return jax.tree.map(lambda x, v: _write(x, (*at, level), v), levels, value)


def total(levels: Array, count: Int[Array, "..."]) -> Array:
    """The sum of all leaves: what is left joins from the smallest sum up, earlier leaves left.

    `count` has the shape of the axes before the level axis.
    """
    x = jnp.moveaxis(levels, count.ndim, 0)
    value, some = jnp.zeros_like(x[0]), jnp.zeros(count.shape, bool)

    def where(mask, a, b):
        return jnp.where(mask.reshape(*mask.shape, *(1,) * (a.ndim - mask.ndim)), a, b)

    for level in range(x.shape[0]):
        here = (count >> level) & 1 == 1
        value = where(here, where(some, x[level] + value, x[level]), value)
        some = some | here
    return value


def _read(x: Array, index: tuple[Any, ...], shape: tuple[int, ...]) -> Array:
    start = (*index, *(0,) * len(shape))
    return lax.dynamic_slice(x, start, (*(1,) * len(index), *shape)).reshape(shape)


def _write(x: Array, index: tuple[Any, ...], value: Array) -> Array:
    start = (*index, *(0,) * value.ndim)
    return lax.dynamic_update_slice(x, value.reshape(*(1,) * len(index), *value.shape), start)
