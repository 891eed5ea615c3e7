"""The head of GLM-5.2, and small ones whose last block reaches back."""

import numpy as np

from pallas_kernels.backend import XLA
from pallas_kernels.cases import EPS, Bounded, Case, Cost, Op, Part, case, struct
from pallas_kernels.head_logprob import op
from pallas_kernels.head_logprob.reference import head_logprob_reference
from pallas_kernels.pinned_matmul.order import Order

DTYPES = ("float32", "bfloat16")

CASES = (
    *(
        case(name, dtype, tag, M=m, D=d, V=v, B=512, n=n)
        for dtype in DTYPES
        for name, tag, m, d, v, n in (
            ("reaches back", "test", 19, 40, 640, 3),
            ("no row", "test", 0, 24, 256, 2),
            ("one block, no top", "test", 5, 300, 128, 0),
            ("five blocks", "more", 70, 600, 2176, 5),
            ("one row", "more", 1, 64, 1280, 1),
            ("three tiles", "more", 600, 64, 640, 2),
        )
    ),
    *(case("rows", dtype, "rows", M=1, D=40, V=384, B=256, n=1) for dtype in DTYPES),
    *(
        case("head", "bfloat16", "glm-5.2", M=m, D=6144, V=154880, B=512, n=n)
        for m, n in ((16, 8), (1024, 0))
    ),
)


def _inputs(case: Case):
    m, d, v = (case[letter] for letter in "MDV")
    return struct(case.dtype, m, d), struct(case.dtype, d, v), struct("int32", m)


def _draw(case: Case, rng: np.random.Generator):
    """Logits of a size that many ids share in the sum; exponents are spread less than elsewhere."""
    hidden, w, targets = _inputs(case)
    scale = 2.0 ** rng.integers(-1, 2, hidden.shape) * case["D"] ** -0.5
    return (
        (rng.standard_normal(hidden.shape) * scale).astype(hidden.dtype),
        # f32: the real head has a billion numbers.
        rng.standard_normal(w.shape, np.float32).astype(w.dtype),
        rng.integers(0, case["V"], targets.shape, np.int32),
    )


def _run(case: Case, backend):
    sizes = (case["n"], min(case["B"], case["V"]), Order())
    return lambda hidden, w, targets: op.forward(hidden, w, targets, sizes, backend)


def _reference(case: Case, hidden, w, targets):
    right = head_logprob_reference(hidden, w, targets, case["n"])
    # A logit's absolute error, those of exp and of a sum over the vocabulary, and the last steps.
    size = (abs(hidden) @ abs(w)).max(axis=1, initial=0.0)
    error = (2 * case["D"] + 8) * EPS["float32"] * size + 4 * case["V"] * EPS["float32"]
    target, lse, top = (
        Bounded(x, (error if x.ndim == 1 else error[:, None]) + 4 * EPS["float32"] * abs(x))
        for x in right[:3]
    )
    return target, lse, top, Bounded(right[3], 0 * right[3])


def _mutation(case: Case):
    return _run(case.replace(B=case["B"] // 2), XLA)


def _cost(case: Case) -> Cost:
    m, d, v = (case[letter] for letter in "MDV")
    item = struct(case.dtype, 1).dtype.itemsize
    return Cost(2 * m * d * v, item * (m * d + d * v) + 8 * m)


OP = Op(
    "head_logprob",
    (
        Part(
            "forward",
            op.KINDS,
            _inputs,
            _run,
            _reference,
            _cost,
            _mutation,
            by_row=(0, 2),
            draw=_draw,
        ),
    ),
    CASES,
)
