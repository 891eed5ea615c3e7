"""Which rows of a sorted batch make which tiles: integers only."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


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
    counts_E: Int[Array, "E"]
    """Rows of each group."""
    first: Int[Array, ""]
    """Matrix of the first group: 0, unless the groups are some of more matrices."""

    def among(self, first: Int[Array, ""] | int) -> "GroupPlan":
        """The plan for groups whose matrices start at number `first` of a longer stack."""
        return self._replace(
            group_of_tile=self.group_of_tile + first,
            first=jnp.asarray(self.first + first, jnp.int32),
        )


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
        group_n,
        start_n.astype(jnp.int32),
        row_end_E[group_n].astype(jnp.int32),
        tile_end_E[-1],
        counts_E,
        jnp.int32(0),
    )
