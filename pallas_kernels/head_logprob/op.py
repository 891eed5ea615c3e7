"""The head: log-probabilities of targets and the most likely ids; logits are never held.

    logprob(t) = logit_t - (m + log sum_v exp(logit_v - m)),   m = max_v logit_v

Numerics contract. Logits are f32 products in the leaves and tree of `pinned_matmul`. The vocabulary
is read in blocks of `block` ids, ascending; the last one reaches back and counts each id once. For
each block: the maximum with those before, exp of the block and of the old maximum beside it, the
block's sum by `row_sum`, and `total * factor + part`, each rounded, all f32; at the end one log.
The top is by (logit descending, id ascending), -0 = +0, NaN last, exact. Bits depend on the row,
the head, `block` and `Order` alone; the kernel's tiles change none. These are the bits of
`glm_jax.head.score`, which has its own loop, as it also shapes and holds logits where asked.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, Implementation, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.head_logprob import pallas_tpu, xla
from pallas_kernels.pinned_matmul.order import Order

KINDS = ("xla", "tpu")
"""Implementations of the forward; there is no gradient."""
DTYPES = ("float32", "bfloat16")
WHOLE_ROWS = 8
"""The twin has a multiple of so many rows: exp and log of a vector's tail round differently."""
MOST_IDS = 2**24
"""Ids are carried in f32."""


class Scores(NamedTuple):
    """What the head says of each row."""

    target_M: Float[Array, "M"]
    """Log-probability of the row's target; -inf for an id outside of the vocabulary."""
    lse_M: Float[Array, "M"]
    """log sum exp of the row's logits."""
    top_logprobs_Mn: Float[Array, "M n"]
    """Largest log-probabilities, descending; ties to the lower id."""
    top_ids_Mn: Int[Array, "M n"]


def head_logprob(
    hidden_MD: Float[Array, "M D"],
    w_DV: Float[Array, "D V"],
    targets_M: Int[Array, "M"],
    *,
    top: int = 0,
    block: int = 512,
    order: Order | None = None,
    implementation: Implementation | Backend = "auto",
) -> Scores:
    """Scores each row's target under the softmax of `hidden @ w`.

    Args:
        hidden_MD: rows; f32 or bf16.
        w_DV: the head, of the same dtype.
        targets_M: ids.
        top: how many of the most likely ids to return, at most V and `block`.
        block: ids at once; a vocabulary below it is one block.
        order: default: that of the numerics contract.
        implementation: what runs; see `pallas_kernels.backend`.

    Raises:
        TypeError: the dtypes differ. KernelError: a dtype, shape or size that is not supported, no
            such implementation, or its gradient is asked for.
    """
    _check(hidden_MD, w_DV, targets_M)
    for name, value, least, most in (
        ("top", top, 0, min(block, w_DV.shape[1])),
        ("block", block, 1, MOST_IDS),
    ):
        if not least <= value <= most:
            raise KernelError(f"head_logprob: {name} {value}: must be {least} to {most}")
    backend = resolve("head_logprob", implementation, KINDS)
    sizes = (top, min(block, w_DV.shape[1]), order or Order())
    return _score(hidden_MD, w_DV, targets_M, sizes, backend)


def _check(hidden: Array, w: Array, targets: Array) -> None:
    if hidden.dtype != w.dtype:
        raise TypeError(f"head_logprob: hidden is {hidden.dtype}, w is {w.dtype}; cast one of them")
    if hidden.dtype.name not in DTYPES:
        raise KernelError(f"head_logprob: dtype {hidden.dtype}; supported are {', '.join(DTYPES)}")
    shapes = hidden.shape, w.shape, targets.shape
    if hidden.ndim != 2 or w.ndim != 2 or shapes[0][1:] != shapes[1][:1] or w.size == 0:
        raise KernelError("head_logprob: hidden {}, w {} [D, V] do not fit".format(*shapes[:2]))
    if shapes[2] != shapes[0][:1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise KernelError(
            f"head_logprob: targets {targets.dtype}{shapes[2]}: need an integer a row of "
            f"{shapes[0]}"
        )
    if w.shape[1] > MOST_IDS:
        raise KernelError(f"head_logprob: vocabulary {w.shape[1]}: must be at most {MOST_IDS}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _score(hidden_MD, w_DV, targets_M, sizes, backend):
    return Scores(*forward(hidden_MD, w_DV, targets_M, sizes, backend))


def _fwd(hidden_MD, w_DV, targets_M, sizes, backend):
    raise KernelError(
        "head_logprob: gradient: there is none; glm_jax.training.backward transposes the head"
    )


def _bwd(sizes, backend, saved, d_scores):
    raise AssertionError("not reached: the forward rule refuses")


_score.defvjp(_fwd, _bwd)


def forward(
    hidden_MD: Array,
    w_DV: Array,
    targets_M: Array,
    sizes: tuple[int, int, Order],
    backend: Backend,
) -> tuple[Array, Array, Array, Array]:
    """The fields of `Scores` on one backend; `sizes` are top, block, order."""
    top, block, order = sizes
    n_rows = hidden_MD.shape[0]
    if n_rows == 0:
        none = jnp.zeros((0,), jnp.float32)
        return none, none, jnp.zeros((0, top), jnp.float32), jnp.zeros((0, top), jnp.int32)
    target_M1 = targets_M.astype(jnp.int32)[:, None]
    named = {"top": top, "block": block, "order": order}
    if backend.kind == "tpu":
        interpret = backend.interpret
        found = pallas_tpu.score(hidden_MD, w_DV, target_M1, interpret=interpret, **named)
    else:
        pad = ((0, -n_rows % WHOLE_ROWS), (0, 0))
        found = xla.score(jnp.pad(hidden_MD, pad), w_DV, jnp.pad(target_M1, pad), **named)
        found = tuple(x[:n_rows] for x in found)
    target, lse = found[0][:, 0], found[1][:, 0]
    if top:
        return target, lse, found[2], found[3]
    return target, lse, jnp.zeros((n_rows, 0), jnp.float32), jnp.zeros((n_rows, 0), jnp.int32)
