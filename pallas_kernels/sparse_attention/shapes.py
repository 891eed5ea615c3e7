"""Lists of GLM-5.2 (64 heads, 2,048 keys, latents of 512 + 64), and small ones off every tile."""

import numpy as np

from pallas_kernels.cases import EPS, Bounded, Case, Cost, Op, Part, case, struct
from pallas_kernels.sparse_attention import op, xla
from pallas_kernels.sparse_attention.reference import (
    sparse_attention_gradient_reference,
    sparse_attention_reference,
)

SCALE = 0.0625
DTYPES = ("float32", "bfloat16")

CASES = (
    *(
        case(name, dtype, tag, R=r, N=n, k=k, C=c, K=rank)
        for dtype in DTYPES
        for name, tag, r, n, k, c, rank in (
            ("off the tile", "test", 5, 8, 72, 80, 64),
            ("no row", "test", 0, 4, 16, 24, 16),
            ("nothing listed", "test", 3, 4, 16, 24, 16),
            ("one row", "more", 1, 8, 256, 144, 128),
            ("short list", "more", 19, 4, 12, 48, 32),
        )
    ),
    *(case("rows", dtype, "rows", R=1, N=8, k=72, C=80, K=64) for dtype in DTYPES),
    *(case("mix", "bfloat16", "glm-5.2", R=r, N=64, k=2048, C=576, K=512) for r in (16, 1024)),
    case("mix", "float32", "glm-5.2", R=16, N=64, k=2048, C=576, K=512),
)


def _inputs(case: Case):
    r, n, k, c = (case[letter] for letter in "RNkC")
    arrays = (struct(case.dtype, r, n, c), struct(case.dtype, r, k, c))
    return (*arrays, struct("bool", r, k))


def _draw(case: Case, rng: np.random.Generator):
    """Scores spread over some units; a part of each list counts, of one row only its first key."""
    query, keys, listed = (np.zeros(s.shape, s.dtype) for s in _inputs(case))
    query[:] = rng.standard_normal(query.shape) * 2
    keys[:] = rng.standard_normal(keys.shape) * 2.0 ** rng.integers(-3, 2, keys.shape)
    if case.name != "nothing listed":
        listed[:] = rng.random(listed.shape) < 0.7
        listed[:, :1] = True
        listed[1:2, 1:] = False
    return query, keys, listed


def _run(case: Case, backend):
    return lambda query, keys, listed: op.forward(query, keys, listed, SCALE, case["K"], backend)


def _reference(case: Case, query, keys, listed):
    right, size = sparse_attention_reference(query, keys, listed, SCALE, case["K"])
    if not right.size:
        return (Bounded(right, abs(right)),)
    relative = _weight_error(case, query, keys)
    return (Bounded(right, relative * size + EPS[case.dtype] * abs(right)),)


def _weight_error(case: Case, query, keys) -> np.ndarray:
    """How far a weight may be off, relative, by row and head."""
    # A score's absolute error is a weight's relative one; weights are rounded to the dtype.
    score = np.einsum("rnc,rkc->rnk", abs(query), abs(keys)).max(axis=-1, keepdims=True) * SCALE
    relative = 2 * (case["C"] + 4) * EPS["float32"] * score + 4 * EPS[case.dtype]
    return relative + 2 * (case["k"] + 4) * EPS["float32"]


def _mutation(case: Case):
    def keys_in_another_order(query, keys, listed):
        turned = (keys[:, ::-1], listed[:, ::-1])
        return xla.attend(query, *turned, scale=SCALE, rank=case["K"])

    return keys_in_another_order


def _gradient_inputs(case: Case):
    return (*_inputs(case), struct(case.dtype, case["R"], case["N"], case["K"]))


def _gradient_draw(case: Case, rng: np.random.Generator):
    d = rng.standard_normal((case["R"], case["N"], case["K"]))
    return (*_draw(case, rng), d.astype(_gradient_inputs(case)[-1].dtype))


def _gradient_run(case: Case, backend):
    def gradient(query, keys, listed, d):
        return op.gradient(query, keys, listed, d, SCALE, case["K"], backend)

    return gradient


def _gradient_reference(case: Case, query, keys, listed, d):
    dq, dk, size_q, size_k = sparse_attention_gradient_reference(query, keys, listed, d, SCALE)
    if not dq.size:
        return Bounded(dq, abs(dq)), Bounded(dk, abs(dk))
    relative = _weight_error(case, query, keys)
    # A weight's error enters by itself and by the mean; the score's gradient is rounded once more.
    largest = 3 * relative.max(axis=(1, 2), keepdims=True) + 6 * EPS[case.dtype]
    return tuple(
        Bounded(right, largest * size + EPS[case.dtype] * abs(right))
        for right, size in ((dq, size_q), (dk, size_k))
    )


def _gradient_mutation(case: Case):
    def keys_in_another_order(query, keys, listed, d):
        turned = (keys[:, ::-1], listed[:, ::-1])
        dq, dk = xla.gradient(query, *turned, d, scale=SCALE, rank=case["K"])
        return dq, dk[:, ::-1]

    return keys_in_another_order


def _gradient_cost(case: Case) -> Cost:
    r, n, k, c, rank = (case[letter] for letter in "RNkCK")
    item = struct(case.dtype, 1).dtype.itemsize
    flops = 2 * r * n * k * (3 * c + 2 * rank)
    return Cost(flops, item * r * (2 * k * c + n * (2 * c + rank)))


def _cost(case: Case) -> Cost:
    r, n, k, c, rank = (case[letter] for letter in "RNkCK")
    item = struct(case.dtype, 1).dtype.itemsize
    return Cost(2 * r * n * k * (c + rank), item * r * (k * c + n * (c + rank)))


OP = Op(
    "sparse_attention",
    (
        Part(
            "forward",
            op.KINDS,
            _inputs,
            _run,
            _reference,
            _cost,
            _mutation,
            by_row=(0, 1, 2),
            row_letter="R",
            draw=_draw,
        ),
        Part(
            "gradient",
            op.GRADIENT_KINDS,
            _gradient_inputs,
            _gradient_run,
            _gradient_reference,
            _gradient_cost,
            _gradient_mutation,
            by_row=(0, 1, 2, 3),
            row_letter="R",
            draw=_gradient_draw,
        ),
    ),
    CASES,
)
