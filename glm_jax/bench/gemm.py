"""The yardstick of a forward: the fastest dense matrix product of the same dtype."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm_jax.bench.timing import Task, clocked


class GemmShape(NamedTuple):
    """`[m, k] x [k, n]`."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """A multiply-add counts as two."""
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


SHAPES = (
    GemmShape(512, 512, 512),
    GemmShape(1024, 1024, 1024),
    GemmShape(2048, 2048, 2048),
    GemmShape(2048, 256, 1024),
    GemmShape(2048, 1024, 256),
)
"""Square ones, where libraries are at their best, and tall ones, as in a model's projections."""


def gemm(shape: GemmShape, dtype: str) -> Task:
    """A task that multiplies two matrices as the model does: operands of `dtype`, f32 sums."""
    m, k, n = shape
    left, right = jax.random.split(jax.random.key(0))
    x = jax.random.normal(left, (m, k), jnp.float32).astype(dtype)
    w = jax.random.normal(right, (k, n), jnp.float32).astype(dtype)

    @jax.jit
    def multiply(x, w):
        return jnp.matmul(
            x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        ).astype(dtype)

    return clocked(lambda: multiply(x, w))
