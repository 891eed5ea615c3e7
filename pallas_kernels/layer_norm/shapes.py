"""The norm of the indexer's keys, 128 wide in GLM-5.2."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import EPS, Bounded, Case, Cost, Op, Part, case, struct
from pallas_kernels.layer_norm import op, xla
from pallas_kernels.layer_norm.reference import layer_norm_reference

NORM_EPS = 1e-6
DTYPES = ("float32", "bfloat16")

CASES = (
    *(
        case(name, dtype, tag, M=m, D=d)
        for dtype in DTYPES
        for name, tag, m, d in (
            ("off the tile", "test", 37, 200),
            ("no row", "test", 0, 64),
            ("one row", "more", 1, 128),
            ("narrow", "more", 130, 32),
        )
    ),
    *(case("rows", dtype, "rows", M=1, D=200) for dtype in DTYPES),
    *(case("index key", "bfloat16", "glm-5.2", M=m, D=128) for m in (16, 1024)),
    case("index key", "float32", "glm-5.2", M=1024, D=128),
)


def _inputs(case: Case):
    m, d = case["M"], case["D"]
    return tuple(struct(case.dtype, *shape) for shape in ((m, d), (d,), (d,)))


def _reference(case: Case, x, gain, bias):
    right = layer_norm_reference(x, gain, bias, NORM_EPS)
    if not x.size:
        return (Bounded(right, abs(right)),)
    # The mean is off by so many roundings of the row's largest terms, and so is each centred one.
    slip = abs(x) + abs(x).mean(axis=1, keepdims=True)
    root = 1 / np.sqrt(x.var(axis=1, keepdims=True) + NORM_EPS)
    relative = 2 * (case["D"] + 8) * EPS["float32"]
    bound = relative * slip * root * abs(gain) + EPS["float32"] * abs(bias)
    return (Bounded(right, bound + EPS[case.dtype] * abs(right)),)


def _run(case: Case, backend):
    return lambda x, gain, bias: op.forward(x, gain, bias, NORM_EPS, backend)


def _mutation(case: Case):
    def rounded_sum(x):
        # A result in bf16 hides the order of an f32 sum; rounded terms show in it.
        x = x.astype(case.dtype).astype(jnp.float32)
        half = x.shape[1] // 2
        return jnp.sum(x[:, :half], 1, keepdims=True) + jnp.sum(x[:, half:], 1, keepdims=True)

    def other_order(x, gain, bias):
        return xla.norm(x, gain[None], bias[None], NORM_EPS, row_sum=rounded_sum)[0]

    return other_order


def _cost(case: Case) -> Cost:
    n = case["M"] * case["D"]
    return Cost(8 * n, 2 * n * struct(case.dtype, 1).dtype.itemsize)


OP = Op(
    "layer_norm",
    (Part("forward", op.KINDS, _inputs, _run, _reference, _cost, _mutation, by_row=(0,)),),
    CASES,
)
