"""The selection of GLM-5.2's indexer, 2,048 keys of up to 2^20, and small ones with many ties."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import XLA
from pallas_kernels.cases import Bounded, Case, Cost, Op, Part, case, struct
from pallas_kernels.top_k_select import op
from pallas_kernels.top_k_select.reference import select_ids_reference

CASES = (
    *(
        case(name, "float32", tag, T=t, S=s, k=k)
        for name, tag, t, s, k in (
            ("off the tile", "test", 11, 300, 24),
            ("no row", "test", 0, 40, 8),
            ("all taken", "more", 3, 16, 24),
            ("one", "more", 9, 257, 1),
            ("wide", "more", 2, 5000, 2048),
        )
    ),
    case("rows", "float32", "rows", T=1, S=300, k=24),
    case("decode", "float32", "glm-5.2", T=16, S=2**20, k=2048),
    case("prompt", "float32", "glm-5.2", T=1024, S=16384, k=2048),
)


def _inputs(case: Case):
    return (struct("float32", case["T"], case["S"]),)


def _draw(case: Case, rng: np.random.Generator):
    """A coarse grid around zero: ties everywhere, zeros of both signs, NaN and both infinities."""
    scores = np.round(rng.standard_normal((case["T"], case["S"])) * 4) / 4
    scores = np.where(rng.random(scores.shape) < 0.1, -0.0, scores)
    odd = rng.choice(np.asarray([np.nan, -np.inf, np.inf]), scores.shape)
    return (np.where(rng.random(scores.shape) < 0.05, odd, scores).astype(np.float32),)


def _run(case: Case, backend):
    return lambda scores: op.forward(scores, case["k"], backend)


def _reference(case: Case, scores):
    ids = select_ids_reference(scores, case["k"])
    pad = ((0, 0), (0, case["k"] - ids.shape[1]))
    right = np.pad(ids, pad, constant_values=case["S"]).astype(np.float64)
    return (Bounded(right, np.zeros_like(right)),)


def _mutation(case: Case):
    def ties_to_the_last(scores):
        turned = op.forward(scores[:, ::-1], case["k"], XLA)
        return jnp.sort(case["S"] - 1 - turned, axis=1)

    return ties_to_the_last


def _cost(case: Case) -> Cost:
    """Each score compared once and read once."""
    n = case["T"] * case["S"]
    return Cost(n, 4 * n + 4 * case["T"] * case["k"])


OP = Op(
    "top_k_select",
    (
        Part(
            "forward",
            op.KINDS,
            _inputs,
            _run,
            _reference,
            _cost,
            _mutation,
            by_row=(0,),
            row_letter="T",
            draw=_draw,
        ),
    ),
    CASES,
)
