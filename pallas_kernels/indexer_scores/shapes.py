"""The indexer of GLM-5.2 in a decoding step and a prompt, and small ones."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import XLA
from pallas_kernels.cases import EPS, Bounded, Case, Cost, Op, Part, case, spread, struct
from pallas_kernels.indexer_scores import op
from pallas_kernels.indexer_scores.reference import indexer_scores_reference

DTYPES = ("float32", "bfloat16")

CASES = (
    *(
        case(name, dtype, tag, R=r, I=i, J=j, P=n, s=s, p=p)
        for dtype in DTYPES
        for name, tag, r, i, j, n, s, p in (
            ("eleven pages", "test", 7, 4, 32, 23, 16, 11),
            ("no row", "test", 0, 4, 32, 3, 16, 2),
            ("one page", "more", 1, 3, 24, 1, 32, 1),
            ("as the model", "more", 5, 32, 128, 40, 64, 17),
        )
    ),
    *(case("rows", dtype, "rows", R=1, I=4, J=32, P=9, s=16, p=9) for dtype in DTYPES),
    case("decode", "bfloat16", "glm-5.2", R=16, I=32, J=128, P=2048, s=64, p=16384),
    case("prompt", "bfloat16", "glm-5.2", R=1024, I=32, J=128, P=2048, s=64, p=512),
    case("decode", "float32", "glm-5.2", R=16, I=32, J=128, P=2048, s=64, p=512),
)

N_LAYERS, LAYER = 2, 1


def _inputs(case: Case):
    r, i, j, n, s, p = (case[letter] for letter in "RIJPsp")
    return (
        struct(case.dtype, r, i, j),
        struct("float32", r, i),
        struct(case.dtype, N_LAYERS, n, s, j),
        struct("int32", r, p),
        struct("int32", r),
    )


def _draw(case: Case, rng: np.random.Generator):
    query, weight, pages, table, position = _inputs(case)
    return (
        *(spread(rng, x.shape, x.dtype.name) for x in (query, weight, pages)),
        rng.integers(0, case["P"], table.shape, np.int32),
        rng.integers(0, case["p"] * case["s"], position.shape, np.int32),
    )


def _run(case: Case, backend):
    def run(query, weight, pages, table, position):
        return op.forward(query, weight, pages, jnp.int32(LAYER), table, position, backend)

    return run


def _reference(case: Case, query, weight, pages, table, position):
    right, size = indexer_scores_reference(query, weight, pages[LAYER], table, position)
    bound = (case["J"] + case["I"] + 4) * EPS["float32"] * size
    return (Bounded(right, bound),)


def _mutation(case: Case):
    def heads_descending(query, weight, pages, table, position):
        return _run(case, XLA)(query[:, ::-1], weight[:, ::-1], pages, table, position)

    return heads_descending


def _cost(case: Case) -> Cost:
    """All keys of all pages, each read once a row."""
    r, i, j, s, p = (case[letter] for letter in "RIJsp")
    item = struct(case.dtype, 1).dtype.itemsize
    return Cost(2 * r * i * j * s * p, r * (s * p * (j * item + 4) + i * (j * item + 4)))


OP = Op(
    "indexer_scores",
    (
        Part(
            "forward",
            op.KINDS,
            _inputs,
            _run,
            _reference,
            _cost,
            _mutation,
            by_row=(0, 1, 3, 4),
            row_letter="R",
            draw=_draw,
        ),
    ),
    CASES,
)
