"""Fixed-order XLA twin: a loop over row tiles with a traced trip count."""

import jax.numpy as jnp
from jax import lax


def product(x_RK, w_KN):
    """`x @ w` with f32 accumulation, not yet rounded."""
    return jnp.matmul(
        x_RK, w_KN, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def forward(x_MK, w_EKN, plan, tile, product):
    """`x @ w[group]` a tile at a time. See `op.grouped_matmul`.

    A tile that reaches past its group writes rows of the next group too; those are written again
    by the next group's own tiles, which come later.
    """
    y = jnp.zeros((x_MK.shape[0], w_EKN.shape[2]), x_MK.dtype)

    def body(i, y):
        start = plan.start_of_tile[i]
        x = lax.dynamic_slice_in_dim(x_MK, start, tile, 0)
        w = lax.dynamic_index_in_dim(w_EKN, plan.group_of_tile[i], 0, keepdims=False)
        return lax.dynamic_update_slice_in_dim(y, product(x, w).astype(y.dtype), start, 0)

    return lax.fori_loop(0, plan.n_tiles, body, y)


def weight_gradient(x_MK, dy_MN, w_EKN, plan, tile):
    """`dw[g] = sum over g's rows of x_r^T dy_r`, tiles ascending, accumulated in f32."""

    def body(i, dw):
        start, group = plan.start_of_tile[i], plan.group_of_tile[i]
        mine = start + jnp.arange(tile, dtype=jnp.int32) < plan.end_of_tile[i]
        # Rows of the next group (or spare rows) may hold anything: select, never multiply.
        x = lax.dynamic_slice_in_dim(x_MK, start, tile, 0)
        x = jnp.where(mine[:, None], x, jnp.zeros((), x.dtype))
        dy = lax.dynamic_slice_in_dim(dy_MN, start, tile, 0)
        dy = jnp.where(mine[:, None], dy, jnp.zeros((), dy.dtype))
        part = lax.dot_general(
            x,
            dy,
            (((0,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        old = lax.dynamic_index_in_dim(dw, group, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(dw, old + part, group, 0)

    dw = lax.fori_loop(0, plan.n_tiles, body, jnp.zeros(w_EKN.shape, jnp.float32))
    return dw.astype(w_EKN.dtype)
