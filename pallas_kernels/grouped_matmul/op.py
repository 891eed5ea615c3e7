"""Grouped matrix product with its transposes.

Numerics contract: a row is computed in a tile of fixed shape `[tile, K] x [K, N]` with f32
accumulation and one rounding, so its bits depend on the row and its group's weights only, never on
how many rows the group has or where the row stands. The weight gradient of a group adds its tiles
in ascending row order in f32; a group without rows gets exactly +0.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import xla


class GroupPlan(NamedTuple):
    """Which tile of rows multiplies which group's matrix. All integer."""

    group_of_tile: Int[Array, "n"]
    """Group of each tile; entries past `n_tiles` are unused."""
    start_of_tile: Int[Array, "n"]
    """First row of each tile; the last tile of a group may reach into the next group."""
    end_of_tile: Int[Array, "n"]
    """Row after the last one that belongs to the tile's group."""
    n_tiles: Int[Array, ""]
    """How many tiles there are (traced, so that an empty group costs nothing)."""


def plan_groups(counts_E: Int[Array, "E"], n_rows: int, tile: int) -> GroupPlan:
    """Cuts `n_rows` rows, sorted by group, `counts_E` of each, into tiles of `tile` rows."""
    n_groups = counts_E.shape[0]
    most_tiles = -(-n_rows // tile) + n_groups
    tiles_E = -(-counts_E // tile)
    tile_end_E = jnp.cumsum(tiles_E)
    row_end_E = jnp.cumsum(counts_E)
    tile_n = jnp.arange(most_tiles, dtype=jnp.int32)
    group_n = jnp.sum(tile_end_E[None, :] <= tile_n[:, None], axis=1, dtype=jnp.int32)
    group_n = jnp.minimum(group_n, n_groups - 1)
    index_in_group_n = tile_n - (tile_end_E - tiles_E)[group_n]
    start_n = (row_end_E - counts_E)[group_n] + index_in_group_n * tile
    return GroupPlan(
        group_n, start_n.astype(jnp.int32), row_end_E[group_n].astype(jnp.int32), tile_end_E[-1]
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    x_MK: Float[Array, "M K"],
    w_EKN: Float[Array, "E K N"],
    plan: GroupPlan,
    tile: int,
    product: Callable[[Array, Array], Array] = xla.product,
) -> Float[Array, "M N"]:
    """Multiplies each row with its group's matrix.

    Args:
        x_MK: rows sorted by group, followed by `tile` spare rows whose content is ignored: M is the
            number of rows plus `tile`.
        w_EKN: one matrix a group, of the same dtype.
        plan: from `plan_groups`, for the same number of rows and tile.
        tile: rows a tile.
        product: `[tile, K] x [K, N]` in f32, the arithmetic of one tile.

    Returns:
        `[M, N]` in the dtype of `x_MK`; the spare rows hold nothing of meaning.

    Raises:
        TypeError: the dtypes differ. ValueError: the shapes do not fit.
    """
    _check(x_MK, w_EKN, tile)
    return xla.forward(x_MK, w_EKN, plan, tile, product)


def _check(x_MK, w_EKN, tile):
    if x_MK.dtype != w_EKN.dtype:
        raise TypeError(f"grouped_matmul: x is {x_MK.dtype}, w is {w_EKN.dtype}; cast one of them")
    if x_MK.ndim != 2 or w_EKN.ndim != 3 or x_MK.shape[1] != w_EKN.shape[1]:
        raise ValueError(f"grouped_matmul: x {x_MK.shape} does not fit w {w_EKN.shape} [E, K, N]")
    if x_MK.shape[0] < tile:
        raise ValueError(
            f"grouped_matmul: x has {x_MK.shape[0]} rows, fewer than the spare tile of {tile}"
        )


def _fwd(x_MK, w_EKN, plan, tile, product):
    return grouped_matmul(x_MK, w_EKN, plan, tile, product), (x_MK, w_EKN, plan)


def _bwd(tile, product, saved, dy_MN):
    x_MK, w_EKN, plan = saved
    dx_MK = xla.forward(dy_MN, jnp.swapaxes(w_EKN, 1, 2), plan, tile, product)
    dw_EKN = xla.weight_gradient(x_MK, dy_MN, w_EKN, plan, tile)
    none = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), plan)
    return dx_MK, dw_EKN, none


grouped_matmul.defvjp(_fwd, _bwd)
