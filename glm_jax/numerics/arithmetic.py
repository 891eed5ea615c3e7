"""The two arithmetics: products, and how a region runs over the rows of a batch."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract
from pallas_kernels.backend import XLA, Backend
from pallas_kernels.grouped_matmul import GroupPlan, grouped_matmul
from pallas_kernels.pinned_matmul import Order
from pallas_kernels.pinned_matmul import pinned_matmul as pinned_kernel
from pallas_kernels.pinned_matmul import xla as pinned_xla
from pallas_kernels.rowwise import weighted_sums
from pallas_kernels.tree import tree_sum


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Products and row regions under a contract. Static: it is part of a program's identity.

    A *region* is a pure function of some rows. Under a pinned contract it is the body of a loop of
    fixed shape with a traced trip count, so that XLA compiles one body whatever the batch is; under
    a native one it is applied to all rows at once.
    """

    contract: NumericsContract

    def matmul(self, x: Array, w: Array, *, out: DTypeLike | None = None) -> Array:
        """Contracts all axes of `x` but the first with the leading axes of `w`.

        `x [R, *K] x w [*K, *N] -> [R, *N]`, f32 accumulation, one rounding to `out` (default: the
        dtype of `x`).

        Raises:
            TypeError: the dtypes differ; nothing is promoted silently.
        """
        if x.dtype != w.dtype:
            raise TypeError(f"matmul: operands are {x.dtype} and {w.dtype}; cast one of them")
        n_contracted = x.ndim - 1
        tail = w.shape[n_contracted:]
        x_RK, w_KN = x.reshape(x.shape[0], -1), w.reshape(-1, math.prod(tail))
        y_RN = self.product(x_RK, w_KN)
        return y_RN.astype(out or x.dtype).reshape(x.shape[0], *tail)

    def product(self, x_RK: Array, w_KN: Array) -> Float[Array, "R N"]:
        """`x @ w` in f32, not yet rounded."""
        if not self.contract.pinned:
            return dot(x_RK, w_KN)
        return pinned_matmul(x_RK, w_KN, self.contract)

    def row_sum(self, x_RK: Float[Array, "R K"]) -> Float[Array, "R W"]:
        """Sum of each row in f32, repeated over W equal columns.

        Pinned: a product with ones. A reduction's order is the compiler's choice and was seen to
        change with the number of rows; a product's was not. The repeated columns keep vectors full:
        XLA's exp and log round differently in a vector's tail.
        """
        if not self.contract.pinned:
            return jnp.sum(x_RK, axis=1, keepdims=True)
        return self.weighted_sums(x_RK, np.ones((x_RK.shape[1], self.contract.sum_width)))

    def weighted_sums(self, x_RK: Float[Array, "R K"], weights_KW: np.ndarray) -> Array:
        """`x @ weights` in f32 for constant weights of `sum_width` columns, `[R, sum_width]`.

        Its order is that of a pinned product, whatever computes those of the weights.
        """
        weights = jnp.asarray(weights_KW.astype(np.float32))
        return weighted_sums(x_RK, weights, product_order(self.contract), self.contract.sum_pad)

    def matmul_by_head(self, x_RNI: Float[Array, "R N I"], w_NIO: Float[Array, "N I O"]) -> Array:
        """`x[:, n] @ w[n]` for every head, `[R, N, O]`.

        Heads are moved to the front first: with the batch axis in the middle XLA's CPU backend
        falls back to a scalar loop in f32 and has no product at all in bf16.
        """
        if x_RNI.dtype != w_NIO.dtype:
            raise TypeError(f"matmul_by_head: operands are {x_RNI.dtype} and {w_NIO.dtype}")
        heads_NRI = jnp.swapaxes(x_RNI, 0, 1)
        if not self.contract.pinned:
            y_NRO = batched_dot("nri,nio->nro", heads_NRI, w_NIO)
        else:
            y_NRO = pinned_by_head(heads_NRI, w_NIO, self.contract)
        return jnp.swapaxes(y_NRO.astype(x_RNI.dtype), 0, 1)

    def backend(self, op: str) -> Backend:
        """What computes an operation of `pallas_kernels`; native arithmetic uses no kernel."""
        return self.contract.backend(op) if self.contract.pinned else XLA

    def grouped_matmul(
        self, x_MK: Float[Array, "M K"], w_EKN: Float[Array, "E K N"], plan: GroupPlan, tile: int
    ) -> Float[Array, "M N"]:
        """Each row times its group's matrix, in this arithmetic; see `pallas_kernels`."""
        if not self.contract.pinned:
            return grouped_matmul(x_MK, w_EKN, plan, tile, self.product)
        return grouped_matmul(
            x_MK,
            w_EKN,
            plan,
            tile,
            self.product,
            order=product_order(self.contract),
            implementation=self.backend("grouped_matmul"),
        )

    def spread(self, gain_D: Float[Array, "D"], n_rows: int) -> Float[Array, "_ D"]:
        """A gain in f32, to be multiplied with `n_rows` rows."""
        del n_rows  # broadcasting does it; what notes gradients needs a gain a row
        return gain_D.astype(jnp.float32)[None, :]

    def row_tile(self, n_rows: int) -> int:
        """Rows a region processes at once, for a batch of `n_rows`."""
        return _largest(self.contract.row_tiles, n_rows)

    def bucket(self, n_rows: int) -> int:
        """Rows that a batch of `n_rows` is padded to: whole tiles, or nothing in native mode."""
        if not self.contract.pinned:
            return n_rows
        # Few rows cost what reading the weights costs: one half-empty tile is cheaper than two.
        tile = self.row_tile(max(n_rows, min(2 * n_rows, self.contract.block_below)))
        return -(-n_rows // tile) * tile

    def expert_tile(self, rows_an_expert: int) -> int:
        """Rows of one expert processed at once, for an average of `rows_an_expert`."""
        # Half-empty tiles of a larger size are cheaper than many small ones.
        return _largest(self.contract.expert_tiles, 2 * rows_an_expert)

    def rows(
        self,
        region: Callable[..., Any],
        n_rows: Int[Array, ""],
        *args: Any,
        exponential: bool = False,
    ) -> Any:
        """Applies a region to the first `n_rows` rows of `args`.

        Rows after them are undefined: zeros, or what the last tile made of the padding in it.

        Args:
            region: maps pytrees of `[R, ...]` arrays to a pytree of `[R, ...]` arrays, row by row.
            n_rows: number of rows that matter (traced).
            *args: pytrees of `[T, ...]` arrays, T a multiple of the row tile.
            exponential: the region has an `exp`: it gets at least `exp_rows` rows.
        """
        if not self.contract.pinned:
            return region(*args)
        total = jax.tree.leaves(args)[0].shape[0]
        tile = self.row_tile(total)
        if total % tile:
            raise GlmError(
                f"rows: {total} are no whole tiles of {tile}; pad the batch to {self.bucket(total)}"
            )
        if exponential and tile < self.contract.exp_rows:
            tile = self.contract.exp_rows
            args = jax.tree.map(lambda a: _pad_rows(a, -total % tile), args)
        out = self._loop(region, tile, n_rows, args)
        return jax.tree.map(lambda a: a[:total], out)

    def _loop(self, region: Callable[..., Any], tile: int, n_rows: Array, args: Any) -> Any:
        """Applies a region tile by tile; the trip count is traced."""
        total = jax.tree.leaves(args)[0].shape[0]

        def part(i):
            return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, i * tile, tile, 0), args)

        def body(i, out):
            new = region(*part(i))
            return jax.tree.map(
                lambda o, n: lax.dynamic_update_slice_in_dim(o, n, i * tile, 0), out, new
            )

        shapes = jax.eval_shape(lambda: region(*part(0)))
        empty = jax.tree.map(lambda s: jnp.zeros((total, *s.shape[1:]), s.dtype), shapes)
        return lax.fori_loop(0, (n_rows + tile - 1) // tile, body, empty)


def _pad_rows(x: Array, n: int) -> Array:
    return jnp.pad(x, ((0, n), *((0, 0),) * (x.ndim - 1)))


def native() -> Arithmetic:
    """Stock XLA arithmetic on this machine's default device."""
    return Arithmetic(NumericsContract(mode="native"))


def dot(x_RK: Array, w_KN: Array) -> Float[Array, "R N"]:
    """One product with f32 accumulation, not yet rounded."""
    # "highest": the default would be bf16 passes on TPU and TF32 on GPU for f32 operands.
    return jnp.matmul(
        x_RK, w_KN, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def batched_dot(spec: str, a: Array, b: Array) -> Array:
    """Einsum with f32 accumulation, not yet rounded, for products that are per row or per group."""
    return jnp.einsum(
        spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def pinned_matmul(x_RK: Array, w_KN: Array, contract: NumericsContract) -> Float[Array, "R N"]:
    """A product whose bits do not depend on the number of rows.

    K is cut in leaves that a tree adds. N is padded to a multiple of `column_pad` and, in f32 and
    for few rows, cut in blocks: at these widths the CPU's product was found to give the same bits
    for every tile of rows (docs/numerics.md; `check invariance` proves it where it runs).
    """
    order = product_order(contract)
    backend = contract.backend("pinned_matmul")
    if backend.kind == "xla":
        # The twin itself, not the operation around it: its gradient is then XLA's transpose of
        # the twin, which the training contract was made with.
        return pinned_xla.contract(x_RK, w_KN, order)
    return pinned_kernel(x_RK, w_KN, order=order, out=jnp.float32, implementation=backend)


def product_order(contract: NumericsContract) -> Order:
    """How the contract cuts a product."""
    return Order(
        k_leaf=contract.k_leaf,
        column_block=contract.column_block,
        block_below=contract.block_below,
        column_pad=contract.column_pad,
    )


def pinned_by_head(x_NRI: Array, w_NIO: Array, contract: NumericsContract) -> Array:
    """`x[n] @ w[n]` in leaves of K and blocks of N, in every dtype and for every number of rows.

    Wider products by head were seen to change with the number of rows in both dtypes.
    """
    leaves = []
    for k in range(0, w_NIO.shape[1], contract.k_leaf):
        blocks = []
        for n in range(0, w_NIO.shape[2], contract.column_block):
            w = w_NIO[:, k : k + contract.k_leaf, n : n + contract.column_block]
            width, pad = w.shape[2], -w.shape[2] % contract.column_pad
            x = x_NRI[:, :, k : k + contract.k_leaf]
            wide = batched_dot("nri,nio->nro", x, jnp.pad(w, ((0, 0), (0, 0), (0, pad))))
            blocks.append(wide[..., :width])
        leaves.append(jnp.concatenate(blocks, axis=2) if len(blocks) > 1 else blocks[0])
    return tree_sum(leaves)


def _largest(tiles: tuple[int, ...], n_rows: int) -> int:
    """The largest tile not above `n_rows`; the smallest if all are."""
    return max((tile for tile in tiles if tile <= n_rows), default=tiles[0])
