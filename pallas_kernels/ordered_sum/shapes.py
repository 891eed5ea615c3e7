"""Leaves as GLM-5.2 gathers them: 8 and 16 ranks of a token's stream, and of a weight gradient."""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import EPS, Bounded, Case, Cost, Op, Part, case, spread, struct
from pallas_kernels.ordered_sum import op
from pallas_kernels.ordered_sum.reference import ordered_sum_reference

DTYPES = ("float32", "bfloat16")

CASES = (
    *(
        case(name, dtype, tag, G=g, M=m, D=d)
        for dtype in DTYPES
        for name, tag, g, m, d in (
            ("odd leaves", "test", 5, 37, 200),
            ("no row", "test", 3, 0, 64),
            ("one leaf", "more", 1, 3, 40),
            ("two tiles", "more", 16, 130, 600),
        )
    ),
    *(case("rows", dtype, "rows", G=7, M=1, D=200) for dtype in DTYPES),
    *(case("stream", dtype, "glm-5.2", G=g, M=1024, D=6144) for dtype in DTYPES for g in (8, 16)),
    case("gradient of q_a", "float32", "glm-5.2", G=8, M=6144, D=2048),
)


def _inputs(case: Case):
    return (struct(case.dtype, case["M"], case["G"], case["D"]),)


def _draw(case: Case, rng: np.random.Generator):
    return (spread(rng, (case["M"], case["G"], case["D"]), case.dtype),)


def _run(case: Case, backend):
    # Rows come first here, as the tests of rows want them.
    return lambda leaves: op.forward(jnp.swapaxes(leaves, 0, 1), backend)


def _reference(case: Case, leaves):
    leaves = leaves.swapaxes(0, 1)
    right, size = ordered_sum_reference(leaves), ordered_sum_reference(abs(leaves))
    bound = case["G"].bit_length() * EPS["float32"] * size + EPS[case.dtype] * abs(right)
    return (Bounded(right, bound),)


def _mutation(case: Case):
    def ascending(leaves):
        wide = [leaves[:, g].astype(case.dtype) for g in range(case["G"])]
        return functools.reduce(jnp.add, wide)

    return ascending


def _cost(case: Case) -> Cost:
    n = case["M"] * case["D"]
    return Cost((case["G"] - 1) * n, (case["G"] + 1) * n * struct(case.dtype, 1).dtype.itemsize)


OP = Op(
    "ordered_sum",
    (Part("forward", op.KINDS, _inputs, _run, _reference, _cost, _mutation, (0,), draw=_draw),),
    CASES,
)
