"""Fixed-order XLA twin: what the model runs on a CPU; the kernel weighs heads by it too."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

SHARED_ROWS = 64
"""Neighbouring rows that may share one product with a page of index keys."""


def paged_scores(
    query_RIJ: Float[Array, "R I J"],
    weight_RI: Float[Array, "R I"],
    pages_LPsJ: Float[Array, "L P s J"],
    layer: int | Array,
    table_Rp: Int[Array, "R p"],
    position_R: Int[Array, "R"],
) -> Float[Array, "R S"]:
    """Index scores of each row's keys, a page at a time; -inf after its own position.

    The loop ends with the page of the last position among the rows; which pages are visited beyond
    a row's own does not change its scores.
    """
    n_rows, size = query_RIJ.shape[0], pages_LPsJ.shape[2]
    width = query_RIJ.shape[2]
    # Never past the table, whatever a padding row's position is.
    n_pages = jnp.minimum(jnp.max(position_R) // size + 1, table_Rp.shape[1])
    offset_1s = jnp.arange(size, dtype=jnp.int32)[None, :]

    def body(j, score_RS):
        page_R = lax.dynamic_index_in_dim(table_Rp, j, 1, keepdims=False)
        dot_RIs = _page_products(query_RIJ, pages_LPsJ, layer, page_R)
        part_Rs = weigh_heads(dot_RIs, weight_RI, width)
        causal_Rs = j * size + offset_1s <= position_R[:, None]
        part_Rs = jnp.where(causal_Rs, part_Rs, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(score_RS, part_Rs, j * size, 1)

    none_RS = jnp.full((n_rows, table_Rp.shape[1] * size), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, n_pages, body, none_RS)


def product(
    query_xIJ: jax.Array,
    keys_xsJ: jax.Array,
    precision: lax.Precision | None = lax.Precision.HIGHEST,
) -> jax.Array:
    """`[x, I, J] x [x, s, J] -> [x, I, s]` in f32, not yet rounded."""
    return jnp.einsum(
        "xij,xsj->xis",
        query_xIJ,
        keys_xsJ,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def weigh_heads(dot_xIS: jax.Array, weight_xI: jax.Array, width: int) -> jax.Array:
    """`sum_i w_i relu(dot_i * J^-0.5)`, heads ascending: the order is spelled out."""

    def head(i):
        return jax.nn.relu(dot_xIS[..., i, :] * width**-0.5) * weight_xI[..., i, None]

    score_xS = head(0)
    for i in range(1, weight_xI.shape[-1]):
        score_xS = score_xS + head(i)
    return score_xS


def _page_products(query_RIJ, pages_LPsJ, layer, page_R) -> jax.Array:
    """Products of each row's index queries with the keys of its page, `[R, I, s]`.

    Where neighbouring rows read the same page (a prompt, a training sequence) they share one
    product; the bits are those of a row's own product `[I, J] x [J, page]`.
    """
    n_rows, n_heads, width = query_RIJ.shape
    run = math.gcd(n_rows, SHARED_ROWS)
    page_gr = page_R.reshape(-1, run)

    def keys(page):
        return pages_LPsJ.at[layer, page].get(mode="clip")

    def shared(query_RIJ):
        query_gMJ = query_RIJ.reshape(-1, run * n_heads, width)
        dot = product(query_gMJ, keys(page_gr[:, 0]))
        return dot.reshape(n_rows, n_heads, -1)

    def own(query_RIJ):
        return product(query_RIJ, keys(page_R))

    return lax.cond(jnp.all(page_gr == page_gr[:, :1]), shared, own, query_RIJ)
