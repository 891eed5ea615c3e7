"""Scores of the sparse indexer over the pages of each token.

    score(t, s) = sum_i w_i(t) * relu(q_i(t) . k(s) * J^-0.5)          f32, -inf where s > t

Numerics contract. Keys are read a page at a time: one product `[I, J] x [J, page]` with f32
accumulation (neighbouring rows of one page may share a product in the twin, which gives the same
bits), then heads are added one after another, ascending, in f32. Bits depend on the row's query,
weights, keys and the size of a page alone. No gradient passes: what follows is a selection.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, Implementation, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.indexer_scores import pallas_tpu, xla

KINDS = ("xla", "tpu")
"""Implementations of the forward; there is no gradient."""
DTYPES = ("float32", "bfloat16")


def indexer_scores(
    query_RIJ: Float[Array, "R I J"],
    weight_RI: Float[Array, "R I"],
    pages_LPsJ: Float[Array, "L P s J"],
    layer: int | Int[Array, ""],
    table_Rp: Int[Array, "R p"],
    position_R: Int[Array, "R"],
    *,
    implementation: Implementation | Backend = "auto",
) -> Float[Array, "R S"]:
    """Scores of the `S = p * s` keys of each row's pages, f32; -inf after its own position.

    Args:
        query_RIJ: index queries; f32 or bf16.
        weight_RI: signed head weights, f32.
        pages_LPsJ: pages of index keys of L layers, in the dtype of the queries.
        layer: which of them; a number past the last one reads the last, like a page's.
        table_Rp: the pages of each row, in the order of their positions.
        position_R: of each row; keys up to and including it count.
        implementation: what runs; see `pallas_kernels.backend`.

    Raises:
        TypeError: the dtypes differ. KernelError: a dtype, rank or shape that is not supported, no
            such implementation, or a gradient is asked for.
    """
    _check(query_RIJ, weight_RI, pages_LPsJ, table_Rp, position_R)
    backend = resolve("indexer_scores", implementation, KINDS)
    layer = jnp.asarray(layer, jnp.int32)
    return _scores(query_RIJ, weight_RI, pages_LPsJ, layer, table_Rp, position_R, backend)


def _check(query: Array, weight: Array, pages: Array, table: Array, position: Array) -> None:
    if query.dtype != pages.dtype:
        raise TypeError(
            f"indexer_scores: query is {query.dtype}, pages are {pages.dtype}; cast one"
        )
    if query.dtype.name not in DTYPES:
        raise KernelError(f"indexer_scores: dtype {query.dtype}; supported are {', '.join(DTYPES)}")
    if weight.dtype != jnp.float32:
        raise KernelError(f"indexer_scores: weight {weight.dtype}: must be float32")
    shapes = {"query": query.shape, "weight": weight.shape, "pages": pages.shape}
    shapes |= {"table": table.shape, "position": position.shape}
    fit = query.ndim == 3 and pages.ndim == 4 and table.ndim == 2 and 0 not in query.shape[1:]
    fit = fit and 0 not in pages.shape and query.shape[2] == pages.shape[3]
    rows = query.shape[:1]
    if (
        not fit
        or weight.shape != query.shape[:2]
        or rows != table.shape[:1]
        or rows != position.shape
    ):
        named = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise KernelError(
            f"indexer_scores: {named} do not fit [R, I, J], [R, I], [L, P, s, J], [R, p], [R]"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _scores(query_RIJ, weight_RI, pages_LPsJ, layer, table_Rp, position_R, backend):
    return forward(query_RIJ, weight_RI, pages_LPsJ, layer, table_Rp, position_R, backend)


def _fwd(*args):
    raise KernelError("indexer_scores: gradient: there is none; stop it before the indexer")


def _bwd(backend, saved, d_scores):
    raise AssertionError("not reached: the forward rule refuses")


_scores.defvjp(_fwd, _bwd)


def forward(
    query_RIJ: Array,
    weight_RI: Array,
    pages_LPsJ: Array,
    layer: Array,
    table_Rp: Array,
    position_R: Array,
    backend: Backend,
) -> Array:
    """The scores on one backend."""
    arrays = query_RIJ, weight_RI, pages_LPsJ, layer, table_Rp, position_R
    if query_RIJ.shape[0] == 0 or table_Rp.shape[1] == 0:
        return jnp.zeros((query_RIJ.shape[0], table_Rp.shape[1] * pages_LPsJ.shape[2]), jnp.float32)
    if backend.kind == "tpu":
        return pallas_tpu.scores(*arrays, backend.interpret)
    return xla.paged_scores(*arrays)
