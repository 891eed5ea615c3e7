"""The experts of GLM-5.2, and small groups that are off every tile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import EPS, Bounded, Case, Cost, Op, Part, case, spread, struct
from pallas_kernels.grouped_matmul.op import KINDS, grouped_matmul, plan_groups
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.pinned_matmul import xla as pinned
from pallas_kernels.pinned_matmul.order import Order

ORDER = Order()
TILE = 8
"""Rows of a tile of the twin in tests; a tile of real shapes is `REAL_TILE`."""
REAL_TILE = 64

COUNTS = {
    "off the tile": (3, 9, 17, 1, 10),
    "empty groups": (0, 13, 0, 27, 0),
    "one takes all": (0, 0, 40, 0, 0),
    "no row": (0, 0, 0, 0, 0),
    "many rows": (130, 0, 7, 128, 35),
}
"""Rows of each group, by the case's name."""

DTYPES = ("float32", "bfloat16")

CASES = (
    *(
        case(name, dtype, tag, M=sum(counts), K=k, N=n, E=len(counts))
        for dtype in DTYPES
        for name, counts in COUNTS.items()
        for tag, k, n in (("test" if name == "off the tile" else "more", 600, 200),)
    ),
    *(case("empty groups", dtype, "test", M=40, K=24, N=16, E=5) for dtype in DTYPES),
    case("no row", "float32", "test", M=0, K=24, N=16, E=5),
    case("one takes all", "float32", "test", M=40, K=24, N=16, E=5),
    *(case("rows", dtype, "rows", M=40, K=600, N=80, E=5) for dtype in DTYPES),
    *(
        case(name, "bfloat16", "glm-5.2", M=m, K=k, N=n, E=256)
        for name, k, n in (("gate and up", 6144, 4096), ("down", 2048, 6144))
        for m in (128, 8192)
    ),
)


def _tile(case: Case) -> int:
    return REAL_TILE if "glm-5.2" in case.tags else TILE


def _counts(case: Case, rng: np.random.Generator) -> np.ndarray:
    if case.name in COUNTS:
        return np.asarray(COUNTS[case.name], np.int32)
    return np.bincount(rng.integers(0, case["E"], case["M"]), minlength=case["E"]).astype(np.int32)


SHAPES = {"x": "MK", "w": "EKN", "dy": "MN"}


def _part(name: str, operands: tuple[str, str]) -> Part:
    def shape(case: Case, operand: str) -> tuple[int, ...]:
        spare = _tile(case) if operand != "w" else 0  # the rows are followed by a spare tile
        first, *rest = (case[letter] for letter in SHAPES[operand])
        return (first + spare, *rest)

    def inputs(case: Case):
        arrays = (struct(case.dtype, *shape(case, operand)) for operand in operands)
        return (*arrays, struct("int32", case["E"]))

    def draw(case: Case, rng: np.random.Generator):
        counts_E = _counts(case, rng)
        arrays = [spread(rng, shape(case, operand), case.dtype) for operand in operands]
        for operand, array in zip(operands, arrays, strict=True):
            if operand != "w":
                array[case["M"] :] = np.nan  # what spare rows hold reaches nothing
        return (*arrays, counts_E)

    def run(case: Case, backend):
        tile = _tile(case)
        return functools.partial(
            _run, name, case, tile, lambda x, w: pinned.contract(x, w, ORDER), backend
        )

    def reference(case: Case, a, b, counts_E):
        n_rows = case["M"]
        rows_a, rows_b = a[:n_rows], b[:n_rows]
        if name == "dw":
            right, size = (_dw(f(rows_a), f(rows_b), counts_E) for f in (np.asarray, np.abs))
            bound = (2 * TILE + max(n_rows, 1)) * EPS["float32"] * size
        else:
            b = b.swapaxes(1, 2) if name == "dx" else b
            right = grouped_matmul_reference(rows_a, b, counts_E)
            size = grouped_matmul_reference(abs(rows_a), abs(b), counts_E)
            bound = rows_a.shape[1] * EPS["float32"] * size
        return (Bounded(right, bound + EPS[case.dtype] * abs(right)),)

    def mutation(case: Case):
        def narrow(x, w):
            return pinned.contract(x, w, Order(k_leaf=32))

        if name != "dw":
            return functools.partial(_run, name, case, TILE, narrow, None)
        return functools.partial(_run, name, case, 3 * TILE, narrow, None)

    def cost(case: Case) -> Cost:
        m, k, n, e = (case[letter] for letter in "MKNE")
        item = struct(case.dtype, 1).dtype.itemsize
        return Cost(2 * m * k * n, item * (m * k + m * n + min(m, e) * k * n))

    return Part(name, KINDS, inputs, run, reference, cost, mutation, draw=draw)


def _run(name, case: Case, tile: int, product, backend, a, b, counts_E):
    """One part by way of the public operation; rows of no group are made zero."""
    from pallas_kernels.backend import XLA

    plan = plan_groups(counts_E, case["M"], tile)

    def f(x, w):
        return grouped_matmul(x, w, plan, tile, product, order=ORDER, implementation=backend or XLA)

    spare = tile - (a.shape[0] - case["M"])
    if spare > 0:  # a mutation with larger tiles than the case was drawn for
        a = jnp.pad(a, ((0, spare), (0, 0)))
        b = jnp.pad(b, ((0, spare), (0, 0))) if name == "dw" else b
    if name == "forward":
        return f(a, b)[: case["M"]]
    if name == "dx":
        x = jnp.zeros((a.shape[0], b.shape[1]), a.dtype)
        return jax.vjp(lambda x: f(x, b), x)[1](a)[0][: case["M"]]
    w = jnp.zeros((counts_E.shape[0], a.shape[1], b.shape[1]), a.dtype)
    return jax.vjp(lambda w: f(a, w), w)[1](b)[0]


def _dw(x_MK, dy_MN, counts_E):
    dw = np.zeros((len(counts_E), x_MK.shape[1], dy_MN.shape[1]))
    for group, end in enumerate(np.cumsum(counts_E)):
        rows = slice(end - counts_E[group], end)
        dw[group] = x_MK[rows].T @ dy_MN[rows]
    return dw


OP = Op(
    "grouped_matmul",
    (_part("forward", ("x", "w")), _part("dx", ("dy", "w")), _part("dw", ("x", "dy"))),
    CASES,
)
