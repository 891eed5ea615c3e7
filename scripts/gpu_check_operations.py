"""Time of each operation on a GPU: kernel, twin and plain XLA (cuBLAS), against the roofline.

The three are run in turn, so that a slow second slows all of them. JSON on stdout. With `--dry-run`
the kernels are interpreted at tiny shapes on a CPU, and the figures mean nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.bench.device import device
from glm_jax.bench.timing import clocked, interleaved, median_wall_s
from pallas_kernels.backend import GPU, GPU_DTYPES, GPU_INTERPRET, XLA
from pallas_kernels.cases import Case, Op, Part, case
from pallas_kernels.registry import OPS

BYTES_A_SECOND = 4.3e12
FLOPS_A_SECOND = 790e12
"""What an H200 reaches at most: bandwidth of a copy, and bf16 products."""

SQUARE = case("square", "bfloat16", M=4096, K=4096, N=4096)
FEW_ROWS = case("few rows", "bfloat16", M=64, K=6144, N=16384)
DRY = {"pinned_matmul": "narrow", "grouped_matmul": "empty groups", "sparse_attention": "no row"}
REPEATS = 20


def main() -> int:
    """Measures; exit status 1 if an implementation could not run."""
    parser = argparse.ArgumentParser(description="Times each operation.")
    parser.add_argument("--dry-run", action="store_true")
    dry = parser.parse_args().dry_run
    if not dry and jax.default_backend() != "gpu":
        print(f"no GPU: the platform is {jax.default_backend()}", file=sys.stderr)
        return 1
    found = [
        measured(op, part, shape, dry)
        for op in OPS.values()
        for part in op.parts
        for shape in shapes(op, dry)
    ]
    facts = {"jax": version("jax"), "jaxlib": version("jaxlib"), "device": device()}
    print(json.dumps({**facts, "operations": found}, indent=1, allow_nan=False))
    return int(any("error" in x for x in found))


def shapes(op: Op, dry: bool) -> tuple[Case, ...]:
    """What an operation is timed at."""
    if dry:
        small = [x for x in op.tagged("test") if x.dtype in (*GPU_DTYPES, "bfloat16")]
        named = [x for x in small if x.name == DRY.get(op.name)]
        return tuple((named or small)[:1])
    more = (SQUARE, FEW_ROWS) if op.name == "pinned_matmul" else ()
    return (*op.tagged("glm-5.2"), *more)


def measured(op: Op, part: Part, shape: Case, dry: bool) -> dict[str, Any]:
    """Median seconds of each implementation, and its share of what the device can do."""
    result: dict[str, Any] = {"op": op.name, "part": part.name, "case": str(shape)}
    try:
        arrays = jax.device_put(part.arrays(shape, np.random.default_rng(0)))
        tasks = {name: task(f, arrays) for name, f in programs(op, part, shape, dry).items()}
        samples = interleaved(tasks, 1 if dry else REPEATS, warm_up=0 if dry else 2)
    except Exception as error:  # the next operation is measured all the same
        return {**result, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    cost = part.cost(shape)
    least = max(cost.flops / FLOPS_A_SECOND, cost.n_bytes / BYTES_A_SECOND)
    for name, runs in samples.items():
        seconds = median_wall_s(runs)
        result[name] = {"seconds": seconds, "roofline_share": least / seconds if seconds else 0.0}
    return result


def programs(op: Op, part: Part, shape: Case, dry: bool) -> dict[str, Callable[..., Any]]:
    """Implementation -> function of the arrays."""
    found = {"xla": part.run(shape, XLA)}
    if "gpu" in part.kinds and shape.dtype in GPU_DTYPES:
        found["kernel"] = part.run(shape, GPU_INTERPRET if dry else GPU)
    plain = PLAIN.get((op.name, part.name))
    return found | ({"plain": plain} if plain else {})


def task(f: Callable[..., Any], arrays: tuple[jax.Array, ...]):
    """A clocked call of the compiled function."""
    compiled = jax.jit(f)
    return clocked(lambda: compiled(*arrays))


PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("pinned_matmul", "forward"): jnp.matmul,
    ("pinned_matmul", "dx"): lambda dy, w: dy @ w.T,
    ("pinned_matmul", "dw"): lambda x, dy: x.T @ dy,
    ("ordered_sum", "forward"): lambda leaves: jnp.sum(leaves, axis=0),
}
"""Stock operations that compute the same in whatever order they like."""


if __name__ == "__main__":
    sys.exit(main())
