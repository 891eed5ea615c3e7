"""Programs compiled before the clock runs."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from glm_jax.bench.timing import Sample, clocked
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract

MODES = {"pinned": NumericsContract, "native": lambda: NumericsContract(mode="native")}
"""The contract of each mode, made when asked for: it names the device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Something to measure."""

    contract: NumericsContract
    """The numerics that it runs under."""
    compile_s: float
    """Seconds of tracing and compiling; less where jax finds executables in its disk cache."""
    run: Callable[[], tuple[Array, Any]]
    """Gives log-probabilities, logits or a loss, and whatever else is computed."""
    n_runs: int = 1
    """Runs in one sample, one after the other: a short one needs many."""

    def task(self) -> Sample:
        """Measures one run.

        Raises:
            GlmError: what it computed is not finite, so that its speed would mean nothing.
        """
        kept: list[Array] = []

        def run() -> None:
            for _ in range(self.n_runs):
                # Waits each time: independent runs would overlap.
                kept[:] = jax.block_until_ready(self.run())[:1]

        sample = clocked(run)()
        if not np.isfinite(np.asarray(kept[0], np.float32)).all():
            raise GlmError(
                f"bench: {self.contract.mode} numerics gave values that are not finite; try "
                "--dtype float32, or another --config"
            )
        n = self.n_runs
        return Sample(wall_s=sample.wall_s / n, cpu_s=sample.cpu_s / n)

    def to_json(self) -> dict[str, Any]:
        """How it was made."""
        return {
            "mode": self.contract.mode,
            "contract_digest": self.contract.digest,
            "compile_s": self.compile_s,
        }


def compiled(
    function: Callable[..., Any], *args: Any, donate: int | None = None
) -> tuple[Callable[..., Any], float]:
    """The executable of a function for arguments of these shapes, and the seconds it took.

    Argument number `donate` is consumed by each call.
    """
    began = time.perf_counter()
    executable = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    return executable, time.perf_counter() - began


def flat(model: GlmModel) -> tuple[list[Array], Callable[[list[Array]], GlmModel]]:
    """A model's arrays, and how to build it of them inside a program.

    Flattening a module takes about as long as a short decode step; here it is done once.
    """
    leaves, structure = jax.tree.flatten(model)
    return leaves, lambda leaves: jax.tree.unflatten(structure, leaves)
