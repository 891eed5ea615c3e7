"""Gradient sums in one fixed sparse tree, however the work is cut.

A leaf is the gradient of one chunk of one sequence, addressed by its canonical index
`sequence * 2^13 + chunk`. The sum is the binary tree over all indices, in which what is absent is
the identity of addition and adds no node. An aligned range of indices is a subtree: who holds it
alone gets its `partial`, and two neighbours join by `left + right` to the bits of one counter over
both. Leaves stream in ascending order; one partial sum a level is held.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

CHUNK_BITS = 13
"""Bits of an index below the number of the sequence."""
SEQUENCE_BITS = 31 - CHUNK_BITS
"""Bits of the number of the sequence: an index is an int32."""
IDENTITY = -0.0
"""`x + -0.0` has the bits of `x`, those of both zeros too; `x + 0.0` has not."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counter:
    """Sums so far, one for each place of the leading axes."""

    current: dict[str, Array]
    """The last leaf, `[*lead, *shape]` f32."""
    levels: dict[str, Array]
    """Sums that wait for a right sibling, `[*lead, n_levels, *shape]` f32."""
    last: Int[Array, "*lead"]
    """Index of the last leaf; -1 before the first."""
    present: Int[Array, "*lead"]
    """Bit of each level that holds a sum."""
    chunk_bits: int = dataclasses.field(metadata={"static": True})
    """Levels for chunks of a sequence; the others are for sequences."""


def bits(n: int) -> int:
    """Bits that number `n` things from 0."""
    return (n - 1).bit_length()


def empty(
    shapes: dict[str, tuple[int, ...]],
    chunk_bits: int,
    sequence_bits: int,
    lead: tuple[int, ...] = (),
) -> Counter:
    """No leaves yet, with room for `2^sequence_bits` sequences of `2^chunk_bits` chunks."""
    # One level at least: the first leaf, too, writes to one, though it marks none.
    n_levels = max(1, chunk_bits + sequence_bits)
    return Counter(
        {name: jnp.zeros((*lead, *shape), jnp.float32) for name, shape in shapes.items()},
        {name: jnp.zeros((*lead, n_levels, *shape), jnp.float32) for name, shape in shapes.items()},
        jnp.full(lead, -1, jnp.int32),
        jnp.zeros(lead, jnp.int32),
        chunk_bits,
    )


def extend(
    counter: Counter,
    leaf_of: Callable[[Int[Array, ""]], tuple[Int[Array, ""], dict[str, Array]]],
    start: Int[Array, ""] | int,
    stop: Int[Array, ""] | int,
    at: tuple[Any, ...] = (),
) -> Counter:
    """Adds the leaves number `start` to `stop` at the place `at` of the leading axes.

    `leaf_of(i)` gives a leaf's index, above the one before, and the leaf.
    """
    shapes = {name: x.shape[len(at) :] for name, x in counter.current.items()}

    def body(i, carry):
        levels, current, last, present = carry
        index, leaf = leaf_of(i)
        first = last < 0
        level = jnp.where(first, 0, _level(index, last, counter.chunk_bits))
        below = (jnp.int32(1) << level) - 1

        def merge(carry):
            waiting, value = carry
            lowest = lax.population_count((waiting & -waiting) - 1)

            def add(x, v):
                return _read(x, (*at, lowest), v.shape) + v

            return waiting & (waiting - 1), jax.tree.map(add, levels, value)

        _, value = lax.while_loop(lambda carry: carry[0] != 0, merge, (present & below, current))
        levels = jax.tree.map(lambda x, v: _write(x, (*at, level), v), levels, value)
        present = jnp.where(first, 0, (present & ~below) | (jnp.int32(1) << level))
        return levels, jax.tree.map(lambda x: x.astype(jnp.float32), leaf), index, present

    # The last leaf is carried by itself: read and written in the whole, it would be copied with it.
    current = {name: _read(x, at, shapes[name]) for name, x in counter.current.items()}
    start_carry = (counter.levels, current, counter.last[at], counter.present[at])
    levels, current, last, present = lax.fori_loop(start, stop, body, start_carry)
    return dataclasses.replace(
        counter,
        current={name: _write(x, at, current[name]) for name, x in counter.current.items()},
        levels=levels,
        last=counter.last.at[at].set(last),
        present=counter.present.at[at].set(present),
    )


def push(
    counter: Counter, index: Int[Array, ""], leaf: dict[str, Array], at: tuple[Any, ...] = ()
) -> Counter:
    """Adds the leaf of an index above the last, at the place `at` of the leading axes."""
    return extend(counter, lambda i: (index, leaf), 0, 1, at)


def partial(counter: Counter) -> tuple[dict[str, Array], Bool[Array, "*lead"]]:
    """The sum of each place, `IDENTITY` where no leaf came, and whether one came.

    Sums over two aligned neighbouring ranges of indices join by `left + right`.
    """
    some = counter.last >= 0

    def one(current, levels):
        value = jnp.where(_spread(some, current), current, IDENTITY)
        level_first = jnp.moveaxis(levels, some.ndim, 0)
        for level in range(level_first.shape[0]):
            here = (counter.present >> level) & 1 == 1
            value = jnp.where(_spread(here, value), level_first[level] + value, value)
        return value

    return jax.tree.map(one, counter.current, counter.levels), some


def total(counter: Counter) -> dict[str, Array]:
    """The sum of each place; +0 where no leaf came."""
    value, some = partial(counter)
    return jax.tree.map(lambda x: jnp.where(_spread(some, x), x, 0.0), value)


def _level(index: Array, last: Array, chunk_bits: int) -> Array:
    """Where the sum that ends with `last` waits: the highest bit in which the two differ."""
    bit = 31 - lax.clz(index ^ last)
    return jnp.where(bit < CHUNK_BITS, bit, bit - CHUNK_BITS + chunk_bits)


def _spread(mask: Array, x: Array) -> Array:
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def _read(x: Array, index: tuple[Any, ...], shape: tuple[int, ...]) -> Array:
    start = (*index, *(0,) * len(shape))
    return lax.dynamic_slice(x, start, (*(1,) * len(index), *shape)).reshape(shape)


def _write(x: Array, index: tuple[Any, ...], value: Array) -> Array:
    start = (*index, *(0,) * value.ndim)
    return lax.dynamic_update_slice(x, value.reshape(*(1,) * len(index), *value.shape), start)
