"""The norm of the indexer's keys, 128 wide in GLM-5.2."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import EPS, Bounded, Case, Cost, Op, Part, case, struct
from pallas_kernels.layer_norm import op, xla
from pallas_kernels.layer_norm.reference import (
    layer_norm_gradient_reference,
    layer_norm_reference,
)

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


def _gradient_inputs(case: Case):
    m, d = case["M"], case["D"]
    return tuple(struct(case.dtype, *shape) for shape in ((m, d), (m, d), (d,)))


def _gradient_reference(case: Case, x, dy, gain):
    right = layer_norm_gradient_reference(x, dy, gain, NORM_EPS)
    if not x.size:
        return tuple(Bounded(value, abs(value)) for value in right)
    root = 1 / np.sqrt(x.var(axis=1, keepdims=True) + NORM_EPS)
    # The centred row is off as in the forward, by roundings of the row's largest terms.
    unit = (abs(x) + abs(x).mean(axis=1, keepdims=True)) * root
    g = abs(dy * gain)
    size = root * (g + g.mean(1, keepdims=True) + unit * (g * unit).mean(1, keepdims=True))
    relative, rows = 6 * (case["D"] + 16) * EPS["float32"], case["M"] * EPS["float32"]
    bounds = (
        relative * size,
        (relative + rows) * (abs(dy) * unit).sum(axis=0),
        rows * abs(dy).sum(axis=0),
    )
    return tuple(Bounded(*pair) for pair in zip(right, bounds, strict=True))


def _gradient_mutation(case: Case):
    def other_order(x, dy, gain):
        x, dy, gain = (a.astype(jnp.float32) for a in (x, dy, gain))
        _, vjp = jax.vjp(lambda *a: _norm_of_halves(*a), x, gain, jnp.zeros_like(gain))
        return vjp(dy)

    return other_order


def _norm_of_halves(x, gain, bias):
    def mean(x):
        half = x.shape[1] // 2
        return (x[:, :half].sum(1, keepdims=True) + x[:, half:].sum(1, keepdims=True)) / x.shape[1]

    centred = x - mean(x)
    return centred * jax.lax.rsqrt(mean(centred * centred) + NORM_EPS) * gain[None] + bias[None]


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


def _gradient_cost(case: Case) -> Cost:
    n = case["M"] * case["D"]
    return Cost(16 * n, n * (2 * struct(case.dtype, 1).dtype.itemsize + 4))


OP = Op(
    "layer_norm",
    (
        Part("forward", op.KINDS, _inputs, _run, _reference, _cost, _mutation, by_row=(0,)),
        Part(
            "gradient",
            op.KINDS,
            _gradient_inputs,
            lambda case, backend: lambda x, dy, gain: op.gradient(x, dy, gain, NORM_EPS, backend),
            _gradient_reference,
            _gradient_cost,
            _gradient_mutation,
        ),
    ),
    CASES,
)
