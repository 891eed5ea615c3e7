"""Exact top-k selection under a total order: score descending, then index ascending.

Numerics contract: every step after the scores is integer arithmetic, so the result is a function of
the row's scores alone: no shape, tile, chunk or device can change it. `-0.0` equals `+0.0` (ReLU
and a negative head weight make both), NaN sorts last. There is no approximate mode.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, Implementation, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.top_k_select import pallas_tpu, xla

KINDS = ("xla", "tpu")
"""Implementations; a selection has no gradient."""


def top_k_select(
    scores_TS: Float[Array, "T S"], k: int, *, implementation: Implementation | Backend = "auto"
) -> Int[Array, "T k"]:
    """Columns of the `k` first entries of each row, ascending; padded at the end with `S`.

    No gradient passes.

    Raises:
        KernelError: scores that are not f32 or not of two axes, `k` below 1, or no such
            implementation.
    """
    if scores_TS.dtype != jnp.float32:
        raise KernelError(f"top_k_select: dtype {scores_TS.dtype}; supported is float32")
    if scores_TS.ndim != 2:
        raise KernelError(f"top_k_select: scores {scores_TS.shape}; need [T, S]")
    if k < 1:
        raise KernelError(f"top_k_select: k {k}: must be at least 1")
    backend = resolve("top_k_select", implementation, KINDS)
    return forward(lax.stop_gradient(scores_TS), k, backend)


def forward(scores_TS: Array, k: int, backend: Backend) -> Array:
    """The selection on one backend."""
    n_rows, n_keys = scores_TS.shape
    if backend.kind == "xla" or n_keys <= k or n_rows == 0:  # where all are taken nothing is chosen
        return xla.mask_to_ids(xla.select_mask(scores_TS, k), k)
    return pallas_tpu.select(scores_TS, k, backend.interpret)
