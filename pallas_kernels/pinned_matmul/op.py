"""Matrix product in a fixed order, with its transposes.

Numerics contract. `y = round(tree over leaves of sum_{k in leaf} x_k w_k)`: the contraction is cut
in leaves of `k_leaf`, a leaf is one product with f32 accumulation, leaves are added in a balanced
binary tree in f32, and the result is rounded once. The gradient of `x` is the same product with
`w^T`; that of `w` is cut in leaves of `row_leaf` rows. So the bits of a row depend on the row, on
`w` and on `Order` only, never on the number of rows. Which leaf is one product of which shape is
fixed per backend: `xla.py` for XLA, for the kernels also `tuned.json` (row and column tiles do not
enter a sum; that a device's matrix unit agrees must be proven on it).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.backend import Backend, Implementation, by_gpu, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.pinned_matmul import pallas_gpu, pallas_tpu, xla
from pallas_kernels.pinned_matmul.order import Layout, Order

KINDS = ("xla", "tpu", "gpu")
"""Implementations of the product and of both gradients."""

FEWEST_ROWS = 8
"""XLA's CPU backend has another path for a single row, so the twin never sees fewer."""

DTYPES = ("float32", "bfloat16")


def pinned_matmul(
    x_MK: Float[Array, "M K"],
    w_KN: Float[Array, "K N"],
    *,
    order: Order | None = None,
    out: DTypeLike | None = None,
    implementation: Implementation | Backend = "auto",
) -> Float[Array, "M N"]:
    """`x @ w` with f32 accumulation in the order of `order`, rounded once.

    Args:
        x_MK: rows; f32 or bf16.
        w_KN: weights of the same dtype.
        order: default: that of the numerics contract.
        out: dtype of the result; default: that of `x`.
        implementation: what runs; see `pallas_kernels.backend`.

    Raises:
        TypeError: the dtypes differ. KernelError: a dtype, rank or shape that is not supported, or
            no such implementation.
    """
    _check(x_MK, w_KN)
    backend = resolve("pinned_matmul", implementation, KINDS)
    dtype = jnp.dtype(out or x_MK.dtype).name
    return _product(x_MK, w_KN, order or Order(), dtype, backend)


def _check(x: Any, w: Any) -> None:
    if x.dtype != w.dtype:
        raise TypeError(f"pinned_matmul: x is {x.dtype}, w is {w.dtype}; cast one of them")
    if x.dtype.name not in DTYPES:
        raise KernelError(f"pinned_matmul: dtype {x.dtype}; supported are {', '.join(DTYPES)}")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise KernelError(f"pinned_matmul: x {x.shape} does not fit w {w.shape} [K, N]")
    if w.size == 0:
        raise KernelError(f"pinned_matmul: w {w.shape}: K and N must be at least 1")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(x_MK, w_KN, order, dtype, backend):
    return contract(x_MK, w_KN, "nn", order, order.k_leaf, dtype, backend)


def _fwd(x_MK, w_KN, order, dtype, backend):
    return _product(x_MK, w_KN, order, dtype, backend), (x_MK, w_KN)


def _bwd(order, dtype, backend, saved, dy_MN):
    x_MK, w_KN = saved
    dy_MN = dy_MN.astype(x_MK.dtype)
    dx_MK = contract(dy_MN, w_KN, "nt", order, order.k_leaf, x_MK.dtype.name, backend)
    dw_KN = contract(x_MK, dy_MN, "tn", order, order.row_leaf, w_KN.dtype.name, backend)
    return dx_MK, dw_KN


_product.defvjp(_fwd, _bwd)


def contract(
    a: Array, b: Array, layout: Layout, order: Order, leaf: int, dtype: str, backend: Backend
) -> Array:
    """The product in one layout, on one backend, rounded to `dtype`."""
    n_rows = a.shape[1 if layout == "tn" else 0]
    width = b.shape[0 if layout == "nt" else 1]
    n_inner = a.shape[0 if layout == "tn" else 1]
    if n_rows == 0 or n_inner == 0:  # no row to compute, or a gradient that no row adds to
        return jnp.zeros((n_rows, width), dtype)
    if backend.kind == "tpu":
        return pallas_tpu.contract(a, b, layout, order, leaf, dtype, backend.interpret)
    if by_gpu("pinned_matmul", backend, a.dtype):
        return pallas_gpu.contract(a, b, layout, leaf, dtype, backend.interpret)
    if (pad := FEWEST_ROWS - n_rows) > 0:
        a = jnp.pad(a, ((0, 0), (0, pad)) if layout == "tn" else ((0, pad), (0, 0)))
    return xla.contract(a, b, order, layout, leaf)[:n_rows].astype(dtype)
