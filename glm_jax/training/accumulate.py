"""Gradient sums in one fixed tree, however the work is cut.

A leaf is the gradient of one chunk of one sequence. Leaves arrive in canonical order and are added
like bits of a binary counter: two sums of equal size make one of twice the size. The result is the
balanced tree over all leaves (`numerics.trees.tree_sum`), whatever batches they came in, and at any
time at most log2(n) partial sums are held.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def empty(like: Any, n_levels: int, lead: int = 0) -> Any:
    """Zeroed levels for up to `2^n_levels - 1` leaves; the level axis comes after `lead` axes."""

    def zeros(leaf):
        shape = (*leaf.shape[:lead], n_levels, *leaf.shape[lead:])
        return jnp.zeros(shape, jnp.float32)

    return jax.tree.map(zeros, like)


def push(levels: Any, count: Int[Array, ""], leaf: Any) -> Any:
    """Adds leaf number `count` (from 0)."""
    leaf = jax.tree.map(lambda x: x.astype(jnp.float32), leaf)

    def occupied(carry):
        level, _ = carry
        return (count >> level) & 1 == 1

    def merge(carry):
        level, value = carry
        older = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, level, 0, keepdims=False), levels
        )
        return level + 1, jax.tree.map(jnp.add, older, value)

    level, value = lax.while_loop(occupied, merge, (jnp.int32(0), leaf))
    return jax.tree.map(lambda x, v: lax.dynamic_update_index_in_dim(x, v, level, 0), levels, value)


def total(levels: Any, count: Int[Array, ""], lead: int = 0) -> Any:
    """The sum of all leaves: what is left joins from the smallest sum up, earlier leaves left."""

    def fold(x):
        x = jnp.moveaxis(x, lead, 0)
        value, some = jnp.zeros_like(x[0]), jnp.array(False)
        for level in range(x.shape[0]):
            here = (count >> level) & 1 == 1
            joined = jnp.where(some, x[level] + value, x[level])
            value = jnp.where(here, joined, value)
            some = some | here
        return value

    return jax.tree.map(fold, levels)
