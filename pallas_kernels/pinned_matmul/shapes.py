"""Shapes of the products of GLM-5.2, and small ones that are off every tile."""

import jax.numpy as jnp

from pallas_kernels.cases import EPS, Bounded, Case, Cost, Op, Part, case, struct
from pallas_kernels.pinned_matmul import xla
from pallas_kernels.pinned_matmul.op import KINDS, contract
from pallas_kernels.pinned_matmul.order import Layout, Order
from pallas_kernels.pinned_matmul.reference import pinned_matmul_reference

ORDER = Order()

REAL = {
    "q_a": (6144, 2048),
    "q_b": (2048, 16384),
    "kv_a": (6144, 576),
    "output": (16384, 6144),
    "dense gate and up": (6144, 24576),
    "dense down": (12288, 6144),
    "shared gate and up": (6144, 4096),
    "index query": (2048, 4096),
    "index head weights": (6144, 32),
}

DECODED = ("q_a", "output", "index head weights")
"""Products that are also compiled and timed for a decoding step."""

SMALL = {
    "five leaves": (19, 1100, 130),
    "no row": (0, 600, 80),
    "narrow": (33, 24, 16),
}

MORE = {
    "one leaf": (24, 256, 256),
    "nine leaves": (70, 2304, 64),
    "one row": (1, 600, 80),
    "many tiles": (300, 520, 600),
}

DTYPES = ("float32", "bfloat16")

CASES = (
    *(
        case(name, dtype, tag, M=m, K=k, N=n)
        for dtype in DTYPES
        for tag, shapes in (("test", SMALL), ("more", MORE))
        for name, (m, k, n) in shapes.items()
    ),
    *(case("rows", dtype, "rows", M=1, K=600, N=80) for dtype in DTYPES),
    *(
        case(name, "bfloat16", "glm-5.2", M=m, K=k, N=n)
        for name, (k, n) in REAL.items()
        for m in (16, 1024)
        if m == 1024 or name in DECODED
    ),
    case("router", "float32", "glm-5.2", M=1024, K=6144, N=256),
)


def _part(name: str, layout: Layout, letters: tuple[str, str], by_row: tuple[int, ...]) -> Part:
    """One layout: `letters` are the axes of its two operands."""
    inner = next(letter for letter in letters[0] if letter in letters[1])
    leaf = ORDER.row_leaf if layout == "tn" else ORDER.k_leaf

    def shape(case: Case, axes: str) -> tuple[int, ...]:
        return tuple(case[letter] for letter in axes)

    def inputs(case: Case):
        return tuple(struct(case.dtype, *shape(case, axes)) for axes in letters)

    def run(case: Case, backend):
        return lambda a, b: contract(a, b, layout, ORDER, leaf, case.dtype, backend)

    def natural(a, b):
        return (a.T if layout == "tn" else a), (b.T if layout == "nt" else b)

    def reference(case: Case, a, b):
        a, b = natural(a, b)
        right = pinned_matmul_reference(a, b)
        size = pinned_matmul_reference(abs(a), abs(b))
        # f32 sums of so many products, then one rounding.
        bound = case[inner] * EPS["float32"] * size + EPS[case.dtype] * abs(right)
        return (Bounded(right, bound),)

    def mutation(case: Case):
        def one_leaf_after_another(a, b):
            a, b = natural(a, b)
            total = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
            for k in range(0, a.shape[1], 64):
                total = total + xla.dot(a[:, k : k + 64], b[k : k + 64])
            return total.astype(case.dtype)

        return one_leaf_after_another

    def cost(case: Case) -> Cost:
        size = struct(case.dtype, 1).dtype.itemsize
        m, k, n = case["M"], case["K"], case["N"]
        return Cost(2 * m * k * n, size * (m * k + k * n + m * n))

    exact = layout != "nt"
    return Part(name, KINDS, inputs, run, reference, cost, mutation, by_row, gpu_interpreted=exact)


OP = Op(
    "pinned_matmul",
    (
        _part("forward", "nn", ("MK", "KN"), (0,)),
        _part("dx", "nt", ("MN", "KN"), (0,)),
        _part("dw", "tn", ("MK", "MN"), ()),
    ),
    CASES,
)
