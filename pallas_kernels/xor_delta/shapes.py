"""Weights of GLM-5.2 between two steps of training: few elements change."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Bounded, Case, Cost, Op, Part, case, spread, struct
from pallas_kernels.xor_delta.op import BLOCK, KINDS, UNSIGNED, xor_delta
from pallas_kernels.xor_delta.reference import xor_delta_reference

DTYPES = ("float32", "bfloat16")

CASES = (
    *(
        case(name, dtype, tag, M=m, D=d)
        for dtype in DTYPES
        for name, tag, m, d in (
            ("off the block", "test", 37, 200),
            ("nothing", "test", 0, 64),
            ("one element", "more", 1, 1),
            ("whole blocks", "more", 96, 1024),
        )
    ),
    *(case("rows", dtype, "rows", M=1, D=200) for dtype in DTYPES),
    case("q_a", "float32", "glm-5.2", M=6144, D=2048),
    case("expert down", "bfloat16", "glm-5.2", M=2048, D=6144),
    case("q_b", "bfloat16", "glm-5.2", M=2048, D=16384),
)


def _inputs(case: Case):
    return (struct(case.dtype, case["M"], case["D"]),) * 2


def _draw(case: Case, rng: np.random.Generator):
    """A tenth of the elements changes; some only in the sign of zero; some are NaN in both."""
    old = spread(rng, (case["M"], case["D"]), case.dtype)
    kind = rng.integers(0, 20, old.shape)
    old[kind == 2], old[kind == 3] = 0.0, np.nan
    new = np.where(kind < 2, spread(rng, old.shape, case.dtype), old)
    new[kind == 2] = -0.0
    return old, new


def _run(case: Case, backend):
    return lambda old, new: xor_delta(old, new, implementation=backend)


def _reference(case: Case, old, new):
    # The f64 copies hold every value, but a NaN's bits only as those of the one that was drawn.
    dtype = struct(case.dtype, 1).dtype
    exact = xor_delta_reference(old.astype(dtype), new.astype(dtype), BLOCK)
    return tuple(Bounded(x, np.zeros(x.shape)) for x in exact)


def _mutation(case: Case):
    def by_value(old, new):
        same = (old == new).reshape(-1)
        unsigned = UNSIGNED[case.dtype]
        bits = [x.view(unsigned).reshape(-1) for x in (old, new)]
        delta = jnp.where(same, 0, bits[0] ^ bits[1]).astype(unsigned)
        changed = jnp.pad(~same, (0, -same.size % BLOCK)).reshape(-1, BLOCK)
        return delta, jnp.sum(changed, axis=1, dtype=jnp.int32)

    return by_value


def _cost(case: Case) -> Cost:
    n = case["M"] * case["D"]
    return Cost(2 * n, 3 * n * struct(case.dtype, 1).dtype.itemsize)


OP = Op(
    "xor_delta",
    (Part("forward", KINDS, _inputs, _run, _reference, _cost, _mutation, draw=_draw),),
    CASES,
)
