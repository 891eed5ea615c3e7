"""Timing of one operation at its real shapes, on the device at hand."""

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

from pallas_kernels.backend import IMPLEMENTATIONS, Implementation, resolve
from pallas_kernels.cases import Case, Op, Part

REPEATS = 20


def measure(
    op: Op, part: Part, case: Case, implementation: Implementation = "auto"
) -> dict[str, Any]:
    """Seconds of one call (median), and the rates that follow from the least possible work."""
    backend = resolve(op.name, implementation, part.kinds, part.name)
    arrays = jax.device_put(part.arrays(case, np.random.default_rng(0)))
    f = jax.jit(part.run(case, backend))
    jax.block_until_ready(f(*arrays))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(f(*arrays))
        seconds.append(time.perf_counter() - start)
    median, cost = float(np.median(seconds)), part.cost(case)
    return {
        "op": op.name,
        "part": part.name,
        "case": str(case),
        "backend": str(backend),
        "device": jax.devices()[0].device_kind,
        "seconds": median,
        "tflops": cost.flops / median / 1e12,
        "gb_per_s": cost.n_bytes / median / 1e9,
    }


def main(op: Op) -> None:
    """`python -m pallas_kernels.<op>.bench [--implementation ...] [--tag ...]`: JSON lines."""
    parser = argparse.ArgumentParser(description=f"Time {op.name}.")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="auto")
    parser.add_argument("--tag", default="glm-5.2", help="which shapes: glm-5.2, test")
    parser.add_argument("--part", choices=[part.name for part in op.parts])
    asked = parser.parse_args()
    for part in op.parts:
        if asked.part in (None, part.name):
            for case in op.tagged(asked.tag):
                print(json.dumps(measure(op, part, case, asked.implementation)), flush=True)
