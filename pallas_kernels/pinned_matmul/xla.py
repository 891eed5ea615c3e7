"""Fixed-order XLA twin: the product that the model runs on a CPU.

`leaf` is also what the kernels compute a leaf with, so that in interpret mode both are the same
operations on the same widths.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pinned_matmul.order import AXES, Layout, Order
from pallas_kernels.tree import tree_sum


def dot(a: jax.Array, b: jax.Array, layout: Layout = "nn") -> jax.Array:
    """One product with f32 accumulation, not yet rounded."""
    axis_a, axis_b = AXES[layout]
    # "highest": the default would be bf16 passes on TPU and TF32 on GPU for f32 operands.
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def leaf(a: jax.Array, b: jax.Array, layout: Layout, order: Order, dot=dot) -> jax.Array:
    """The product of one leaf of the contraction.

    Columns are padded to a multiple of `column_pad` and, in f32 and for few rows, computed in
    blocks: at these widths the CPU's product was found to give a row the same bits whatever the
    number of rows (docs/numerics.md).
    """
    axis_a, axis_b = AXES[layout]
    column_axis = 1 - axis_b
    width, n_rows = b.shape[column_axis], a.shape[1 - axis_a]
    few = a.dtype == jnp.float32 and n_rows < order.block_below
    step = order.column_block if few else width
    blocks = []
    for n in range(0, width, step):
        block = lax.slice_in_dim(b, n, min(n + step, width), axis=column_axis)
        n_columns = block.shape[column_axis]
        if pad := -n_columns % order.column_pad:
            pads = [(0, 0), (0, 0)]
            pads[column_axis] = (0, pad)
            block = jnp.pad(block, pads)
        wide = dot(a, block, layout)
        blocks.append(wide[:, :n_columns] if pad else wide)
    return jnp.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0]


def contract(
    a: jax.Array, b: jax.Array, order: Order, layout: Layout = "nn", leaf_width: int | None = None
) -> jax.Array:
    """`a` times `b` in f32: the tree over the leaves of the contraction."""
    axis_a, axis_b = AXES[layout]
    n_inner, step = a.shape[axis_a], leaf_width or order.k_leaf
    leaves = []
    for k in range(0, n_inner, step):
        end = min(k + step, n_inner)
        a_leaf = lax.slice_in_dim(a, k, end, axis=axis_a)
        b_leaf = lax.slice_in_dim(b, k, end, axis=axis_b)
        leaves.append(leaf(a_leaf, b_leaf, layout, order))
    return tree_sum(leaves)
