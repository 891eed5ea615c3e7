"""Grouped matrix product with its transposes.

Numerics contract. A row is computed in a tile of fixed shape `[tile, K] x [K, N]` with f32
accumulation and one rounding, so its bits depend on the row and its group's weights only, never on
how many rows the group has or where the row stands. The weight gradient of a group adds its tiles
in ascending row order in f32, counted from the group's first row; a group without rows gets exactly
+0. In the XLA twin the arithmetic of a tile is the caller's `product`; the kernel computes the one
of `pinned_matmul` in the same leaves.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.backend import XLA, Backend, Implementation, by_gpu, resolve
from pallas_kernels.grouped_matmul import pallas_gpu, pallas_tpu, xla
from pallas_kernels.grouped_matmul.plan import GroupPlan, plan_groups
from pallas_kernels.pinned_matmul.order import Order

KINDS = ("xla", "tpu", "gpu")
"""Implementations of the product and of both gradients."""


def grouped_matmul(
    x_MK: Float[Array, "M K"],
    w_EKN: Float[Array, "E K N"],
    plan: GroupPlan,
    tile: int,
    product: Callable[[Array, Array], Array] = xla.product,
    *,
    order: Order | None = None,
    implementation: Implementation | Backend = XLA,
) -> Float[Array, "M N"]:
    """Multiplies each row with its group's matrix.

    Args:
        x_MK: rows sorted by group, followed by `tile` spare rows whose content is ignored: M is the
            number of rows plus `tile`.
        w_EKN: one matrix a group, of the same dtype; or more, if the plan says which.
        plan: from `plan_groups`, for the same number of rows and tile.
        tile: rows a tile.
        product: `[tile, K] x [K, N]` in f32, the arithmetic of one tile in the XLA twin.
        order: leaves of the kernel's arithmetic; default: those of the numerics contract.
        implementation: what runs; the twin unless told otherwise, since only it knows `product`.

    Returns:
        `[M, N]` in the dtype of `x_MK`; the spare rows hold nothing of meaning.

    Raises:
        TypeError: the dtypes differ. ValueError: the shapes do not fit, or there is no such
            implementation.
    """
    _check(x_MK, w_EKN, tile)
    backend = resolve("grouped_matmul", implementation, KINDS)
    return _product(x_MK, w_EKN, plan, tile, product, order or Order(), backend)


def _check(x_MK, w_EKN, tile):
    if x_MK.dtype != w_EKN.dtype:
        raise TypeError(f"grouped_matmul: x is {x_MK.dtype}, w is {w_EKN.dtype}; cast one of them")
    if x_MK.ndim != 2 or w_EKN.ndim != 3 or x_MK.shape[1] != w_EKN.shape[1]:
        raise ValueError(f"grouped_matmul: x {x_MK.shape} does not fit w {w_EKN.shape} [E, K, N]")
    if x_MK.shape[0] < tile:
        raise ValueError(
            f"grouped_matmul: x has {x_MK.shape[0]} rows, fewer than the spare tile of {tile}"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _product(x_MK, w_EKN, plan, tile, product, order, backend):
    if backend.kind == "tpu":
        return pallas_tpu.forward(x_MK, w_EKN, plan, "nn", order, backend.interpret)
    if by_gpu("grouped_matmul", backend, x_MK.dtype):
        return pallas_gpu.forward(x_MK, w_EKN, plan, "nn", order, backend.interpret)
    return xla.forward(x_MK, w_EKN, plan, tile, product)


def _fwd(x_MK, w_EKN, plan, tile, product, order, backend):
    y_MN = _product(x_MK, w_EKN, plan, tile, product, order, backend)
    return y_MN, (x_MK, w_EKN, plan)


def _bwd(tile, product, order, backend, saved, dy_MN):
    x_MK, w_EKN, plan = saved
    if backend.kind == "tpu":
        interpret = backend.interpret
        dx_MK = pallas_tpu.forward(dy_MN, w_EKN, plan, "nt", order, interpret)
        dw_EKN = pallas_tpu.weight_gradient(x_MK, dy_MN, w_EKN, plan, tile, interpret)
    elif by_gpu("grouped_matmul", backend, x_MK.dtype):
        interpret = backend.interpret
        dx_MK = pallas_gpu.forward(dy_MN, w_EKN, plan, "nt", order, interpret)
        dw_EKN = pallas_gpu.weight_gradient(x_MK, dy_MN, w_EKN, plan, tile, interpret)
    else:
        dx_MK = xla.forward(dy_MN, jnp.swapaxes(w_EKN, 1, 2), plan, tile, product)
        dw_EKN = xla.weight_gradient(x_MK, dy_MN, w_EKN, plan, tile)
    none = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), plan)
    return dx_MK, dw_EKN, none


_product.defvjp(_fwd, _bwd)


__all__ = ["GroupPlan", "grouped_matmul", "plan_groups"]
