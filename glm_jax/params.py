"""Parameters: each is declared once, with shape, dtype, logical axes and initialiser together."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Buffer(nnx.Variable):
    """A stored array that no gradient reaches (the router's selection bias)."""


@dataclasses.dataclass(frozen=True)
class Normal:
    """Draws from N(0, scale^2), in f32, rounded once to the parameter's dtype."""

    scale: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """An f32 array of the given shape."""
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(self.scale)


@dataclasses.dataclass(frozen=True)
class Constant:
    """Fills with one value."""

    value: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """An f32 array of the given shape."""
        return np.full(shape, self.value, np.float32)


Initialiser = Normal | Constant
ONES, ZEROS = Constant(1.0), Constant(0.0)


def declare(
    shape: Sequence[int],
    axes: Sequence[str],
    init: Initialiser,
    dtype: Any,
    *,
    stack: tuple[int, ...] = (),
    kind: type[nnx.Variable] = nnx.Param,
) -> Any:
    """Declares one parameter: a shape in place of an array, so that it costs no memory.

    Args:
        shape: shape in one layer.
        axes: logical name of each axis, from which a mesh rule later derives the sharding.
        init: how `materialise` fills it.
        dtype: stored dtype.
        stack: leading sizes for layers that are stacked and scanned (logical axis `layers`).
        kind: `nnx.Param`, or `Buffer` for what is not trained.
    """
    if len(shape) != len(axes):
        raise ValueError(f"declare: shape {tuple(shape)} has {len(shape)} axes, names are {axes}")
    value = jax.ShapeDtypeStruct((*stack, *shape), jnp.dtype(dtype))
    names = ("layers",) * len(stack) + tuple(axes)
    return kind(value, logical_axes=names, initialiser=init)


def materialise[M: nnx.Module](
    model: M, seed: int, *, sharding: Callable[[str, Any], jax.sharding.Sharding] | None = None
) -> M:
    """Returns the model with its declared parameters drawn.

    Each leaf has its own counter-based stream, keyed by the seed and the leaf's path: its values
    do not depend on the other leaves, on the mesh, or on a compiler.

    Args:
        model: a declared model; it is not changed.
        seed: any non-negative integer.
        sharding: called as `sharding(path, variable)`; default: the default device.
    """
    graphdef, state = nnx.split(nnx.clone(model))
    for path, variable in leaves(state):
        stream = np.random.Philox(key=[seed, zlib.crc32(path.encode())])
        drawn = variable.initialiser.draw(np.random.Generator(stream), variable.shape)
        value = drawn.astype(variable.dtype)
        placed = jax.device_put(value, sharding(path, variable) if sharding else None)
        variable.set_value(placed)
    return nnx.merge(graphdef, state)


def leaves(tree: Any) -> Iterator[tuple[str, nnx.Variable]]:
    """Yields (dotted path, variable) of every parameter and buffer, in a fixed order."""
    state = tree if isinstance(tree, nnx.State) else nnx.state(tree)
    for path, variable in sorted(nnx.to_flat_state(state), key=lambda item: _sort_key(item[0])):
        yield ".".join(str(part) for part in path), variable


def _sort_key(path):
    # Integers (list indices) and names never stand at the same level, but a key must not mix types.
    return tuple(
        (isinstance(part, str), part if isinstance(part, str) else int(part)) for part in path
    )


def size(variable: Any) -> int:
    """Number of elements; works on abstract values too."""
    return math.prod(variable.shape)
