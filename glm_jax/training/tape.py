"""Transposing a region while noting what the gradients of its weights are made of.

The gradient of a weight is `x^T dy` over rows: `x` the rows that met it, `dy` the derivative of its
product. Both are functions of a row alone, so they are computed for all rows at once, in the large
tiles of the forward; only the products over rows are cut in the leaves of the gradient tree. `dy`
is found as the derivative of an addend of zero at each product.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract


class Factors(NamedTuple):
    """The two factors of a weight's gradient, by row."""

    x_R: Array
    """Rows that met the weight `[R, *K]`; for a gain nothing `[R, 0]`."""
    dy_R: Array
    """Derivative of the result `[R, *N]`; for a gain that of the gain in each row."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tape(Arithmetic):
    """Arithmetic that notes the rows of every product with a weight and every gain, in order."""

    addends: list[Array] | None = None
    """What to add to each result; None: keep the results, whose shapes the addends must have."""
    rows_noted: list[Array] = dataclasses.field(default_factory=list)
    results: list[Array] = dataclasses.field(default_factory=list)

    def _note(self, x: Array, y: Array) -> Array:
        self.rows_noted.append(x)
        if self.addends is None:
            self.results.append(y)
            return y
        return y + self.addends[len(self.rows_noted) - 1]

    def matmul(self, x: Array, w: Array, *, out: DTypeLike | None = None) -> Array:
        """As the forward's, noted."""
        return self._note(x, super().matmul(x, w, out=out))

    def matmul_by_head(self, x_RNI: Array, w_NIO: Array) -> Array:
        """As the forward's, noted."""
        return self._note(x_RNI, super().matmul_by_head(x_RNI, w_NIO))

    def spread(self, gain_D: Array, n_rows: int) -> Array:
        """The gain once a row, so that each row has a derivative of its own."""
        gain_RD = jnp.broadcast_to(super().spread(gain_D, n_rows), (n_rows, gain_D.shape[0]))
        return self._note(jnp.zeros((n_rows, 0), gain_RD.dtype), gain_RD)


def pull(
    contract: NumericsContract, region: Callable[..., Any], rows: Any, d_out: Any
) -> tuple[Any, list[Factors]]:
    """Transposes `region(ops, rows)` for one tile.

    Returns:
        Derivatives of `rows`, and the factors of every weight and gain in the order of their use.
    """

    def results(rows):
        tape = Tape(contract)
        region(tape, rows)
        return tape.results

    shapes = jax.eval_shape(results, rows)
    zeros = [jnp.zeros(s.shape, s.dtype) for s in shapes]

    def run(rows, addends):
        tape = Tape(contract, addends)
        return region(tape, rows), tape.rows_noted

    _, vjp, noted = jax.vjp(run, rows, zeros, has_aux=True)
    d_rows, d_addends = vjp(d_out)
    return d_rows, [Factors(x, dy) for x, dy in zip(noted, d_addends, strict=True)]


class Turned(NamedTuple):
    """Factors as XLA's CPU product reads them: rows along the last axis of the left one."""

    x_KR: Array
    """`[K, R]`, by head `[N, K, R]`; for a gain ones `[8, R]`."""
    dy_RN: Array
    """`[R, N]`, by head `[N, R, O]`."""


def turned(factors: Factors, by_head: bool) -> Turned:
    """Factors ready for `leaf`."""
    x, dy = factors
    n_rows = x.shape[0]
    if x.shape[1:] == (0,):
        # Eight rows: a product, not a reduction.
        return Turned(jnp.ones((8, n_rows), jnp.float32), dy.astype(jnp.float32))
    if by_head:
        return Turned(jnp.moveaxis(x, 0, 2), jnp.swapaxes(dy, 0, 1))
    return Turned(x.reshape(n_rows, -1).T, dy.reshape(n_rows, -1))


def leaf(part: Turned, weight_shape: tuple[int, ...]) -> Array:
    """Gradient of one weight or gain over some rows, f32, in the weight's shape.

    Rows that do not count must be zeros in both factors.
    """
    product = rows_product(*part)
    return (product[0] if len(weight_shape) == 1 else product).reshape(weight_shape)


def rows_product(x_KR: Array, dy_RN: Array) -> Array:
    """`x^T dy` in f32, `x^T` given; leading axes are batch axes."""
    return jnp.matmul(
        x_KR, dy_RN, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
