"""Norms of GLM-5.2: the stream, the query latent and the key-value latent."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import EPS, Bounded, Case, Cost, Op, Part, case, struct
from pallas_kernels.rms_norm import op, xla
from pallas_kernels.rms_norm.reference import rms_norm_gradient_reference, rms_norm_reference

NORM_EPS = 1e-5
DTYPES = ("float32", "bfloat16")

CASES = (
    *(
        case(name, dtype, tag, M=m, D=d)
        for dtype in DTYPES
        for name, tag, m, d in (
            ("off the tile", "test", 37, 200),
            ("no row", "test", 0, 64),
            ("one row", "more", 1, 6144),
            ("two tiles", "more", 130, 2048),
        )
    ),
    *(case("rows", dtype, "rows", M=1, D=200) for dtype in DTYPES),
    *(
        case(name, "bfloat16", "glm-5.2", M=m, D=d)
        for name, d in (("stream", 6144), ("query latent", 2048), ("key-value latent", 512))
        for m in (16, 1024)
    ),
    case("stream", "float32", "glm-5.2", M=1024, D=6144),
)


def _rows(case: Case, n: int):
    return (struct(case.dtype, case["M"], case["D"]),) * n


def _inputs(n: int):
    return lambda case: (*_rows(case, n), struct(case.dtype, case["D"]))


def _bound(case: Case, right: np.ndarray, size: np.ndarray | float = 0.0, steps: int = 8):
    """Of the f32 steps and of the mean of D squares, each relative, then of one rounding."""
    relative = (case["D"] + steps) * EPS["float32"]
    return Bounded(right, relative * (abs(right) + size) + EPS[case.dtype] * abs(right))


def _forward_reference(case: Case, x, gain):
    return (_bound(case, rms_norm_reference(x, gain, NORM_EPS)),)


def _add_reference(case: Case, residual, branch, gain):
    total = residual + branch
    # The f32 sum of the two is off by one rounding, which the norm passes on.
    right = rms_norm_reference(total, gain, NORM_EPS)
    root = 1 / np.sqrt((total**2).mean(axis=1, keepdims=True) + NORM_EPS) if total.size else 0.0
    slip = 4 * EPS["float32"] * (abs(residual) + abs(branch)) * root * abs(gain)
    normed = _bound(case, right)
    rounded = Bounded(total, EPS[case.dtype] * abs(total) + EPS["float32"] * abs(total))
    return Bounded(normed.value, normed.bound + slip), rounded


def _gradient_reference(case: Case, x, dy, gain):
    dx, d_gain = rms_norm_gradient_reference(x, dy, gain, NORM_EPS)
    if not x.size:
        return Bounded(dx, abs(dx)), Bounded(d_gain, abs(d_gain))
    root = 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + NORM_EPS)
    g = abs(dy * gain)
    unit = abs(x * root)
    size = root * (g + unit * (g * unit).mean(axis=1, keepdims=True))
    relative = 4 * (case["D"] + 16) * EPS["float32"]
    terms = (abs(dy) * unit).sum(axis=0)
    return (
        Bounded(dx, relative * size),
        Bounded(d_gain, (relative + case["M"] * EPS["float32"]) * terms),
    )


def _other_sum(x):
    """The same sum in another order: halves last."""
    half = x.shape[1] // 2
    return jnp.sum(x[:, :half], 1, keepdims=True) + jnp.sum(x[:, half:], 1, keepdims=True)


def _mutation(case: Case):
    def rounded_sum(squares):
        # A result in bf16 hides the order of an f32 sum; rounded terms show in it.
        return _other_sum(squares.astype(case.dtype).astype(jnp.float32))

    def other_order(*arrays):
        *rows, gain = (a.astype(jnp.float32) for a in arrays)
        total = sum(rows[1:], rows[0])
        y = xla.scale(total, gain[None], NORM_EPS, row_sum=rounded_sum).astype(case.dtype)
        return y if len(rows) == 1 else (y, total.astype(case.dtype))

    return other_order


def _gradient_mutation(case: Case):
    def other_order(x, dy, gain):
        x, dy, gain = (a.astype(jnp.float32) for a in (x, dy, gain))
        root = 1 / jnp.sqrt(_other_sum(x * x) / x.shape[1] + NORM_EPS)
        g, unit = dy * gain[None], x * root
        inner = _other_sum(g * unit) / x.shape[1]
        return root * (g - unit * inner), jnp.sum(dy * unit, axis=0)

    return other_order


def _cost(n_read: int, n_written: int):
    def cost(case: Case) -> Cost:
        size = struct(case.dtype, 1).dtype.itemsize * case["M"] * case["D"]
        return Cost(4 * case["M"] * case["D"], size * (n_read + n_written))

    return cost


OP = Op(
    "rms_norm",
    (
        Part(
            "forward",
            op.KINDS,
            _inputs(1),
            lambda case, backend: lambda x, gain: op.forward(x, gain, NORM_EPS, backend),
            _forward_reference,
            _cost(1, 1),
            _mutation,
            by_row=(0,),
        ),
        Part(
            "add",
            op.KINDS,
            _inputs(2),
            lambda case, backend: lambda a, b, gain: op.add_forward(a, b, gain, NORM_EPS, backend),
            _add_reference,
            _cost(2, 2),
            _mutation,
            by_row=(0, 1),
        ),
        Part(
            "gradient",
            op.KINDS,
            _inputs(2),
            lambda case, backend: lambda x, dy, gain: op.gradient(x, dy, gain, NORM_EPS, backend),
            _gradient_reference,
            _cost(2, 1),
            _gradient_mutation,
        ),
    ),
    CASES,
)
