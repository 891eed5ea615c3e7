"""Absorbed latent attention over a list of keys a token.

Numerics contract. Scores, softmax and mixture of a token are computed over its list as a whole:
one product `[N, C] x [C, k]` with f32 accumulation, the maximum, exp, weights rounded once to the
keys' dtype, one product `[N, k] x [k, C]`, and the weights' sum by `row_sum`; one
rounding of the quotient. The list has a fixed length; what is not
listed is weighted with exactly 0, so its content must be finite (read the token's own row). Bits
depend on the token's query and list alone. The gradient is that of each token's own list, computed
over the list as a whole too; who gathered the lists adds up what several tokens say of one key, in
an order of his own. The model's backward does not ask for it: it mixes under a mask over the whole
sequence (`glm_jax.training.attention`), so that nothing is scattered.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pallas_kernels.backend import Backend, Implementation, by_gpu, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.sparse_attention import pallas_gpu, pallas_tpu, xla

KINDS = ("xla", "tpu", "gpu")
"""Implementations of the forward."""
GRADIENT_KINDS = ("xla", "tpu")
"""Implementations of the gradient."""
DTYPES = ("float32", "bfloat16")


def sparse_attention(
    query_RNC: Float[Array, "R N C"],
    keys_RkC: Float[Array, "R k C"],
    listed_Rk: Bool[Array, "R k"],
    *,
    scale: float,
    rank: int,
    implementation: Implementation | Backend = "auto",
) -> Float[Array, "R N K"]:
    """Mixes each token's listed keys; the first `rank` columns of a key are its value.

    Args:
        query_RNC: absorbed queries; f32 or bf16.
        keys_RkC: each token's list, in ascending order of position, of the same dtype.
        listed_Rk: which entries count; a token without any gets zeros.
        scale: of the scores.
        rank: K, width of a value.
        implementation: what runs; see `pallas_kernels.backend`.

    Raises:
        TypeError: the dtypes differ. KernelError: a dtype or shape that is not supported, no such
            implementation, or a gradient on a backend that has none.
    """
    if query_RNC.dtype != keys_RkC.dtype:
        raise TypeError(
            f"sparse_attention: query is {query_RNC.dtype}, keys are {keys_RkC.dtype}; cast one"
        )
    if query_RNC.dtype.name not in DTYPES:
        raise KernelError(
            f"sparse_attention: dtype {query_RNC.dtype}; supported are {', '.join(DTYPES)}"
        )
    shapes = query_RNC.shape, keys_RkC.shape, listed_Rk.shape
    fit = query_RNC.ndim == keys_RkC.ndim == 3 and keys_RkC.shape[:2] == listed_Rk.shape
    if not fit or (shapes[0][0], shapes[0][2]) != (shapes[1][0], shapes[1][2]):
        raise KernelError(
            "sparse_attention: query {}, keys {}, listed {} do not fit".format(*shapes)
        )
    if not 0 < rank <= keys_RkC.shape[2]:
        raise KernelError(f"sparse_attention: rank {rank}: must be 1 to {keys_RkC.shape[2]}")
    backend = resolve("sparse_attention", implementation, KINDS)
    return _attend(query_RNC, keys_RkC, listed_Rk, scale, rank, backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attend(query_RNC, keys_RkC, listed_Rk, scale, rank, backend):
    return forward(query_RNC, keys_RkC, listed_Rk, scale, rank, backend)


def _fwd(query_RNC, keys_RkC, listed_Rk, scale, rank, backend):
    resolve("sparse_attention", backend, GRADIENT_KINDS, "gradient")
    mixed = _attend(query_RNC, keys_RkC, listed_Rk, scale, rank, backend)
    return mixed, (query_RNC, keys_RkC, listed_Rk)


def _bwd(scale, rank, backend, saved, d_RNK):
    query_RNC, keys_RkC, listed_Rk = saved
    none = np.zeros(listed_Rk.shape, jax.dtypes.float0)
    return (*gradient(query_RNC, keys_RkC, listed_Rk, d_RNK, scale, rank, backend), none)


_attend.defvjp(_fwd, _bwd)


def forward(
    query_RNC: Array, keys_RkC: Array, listed_Rk: Array, scale: float, rank: int, backend: Backend
) -> Array:
    """The mixture on one backend."""
    (n_rows, n_heads, _), n_keys = query_RNC.shape, keys_RkC.shape[1]
    if n_rows == 0 or n_keys == 0:
        return jnp.zeros((n_rows, n_heads, rank), keys_RkC.dtype)
    if backend.kind == "tpu":
        return pallas_tpu.attend(query_RNC, keys_RkC, listed_Rk, scale, rank, backend.interpret)
    if by_gpu("sparse_attention", backend, keys_RkC.dtype):
        return pallas_gpu.attend(query_RNC, keys_RkC, listed_Rk, scale, rank, backend.interpret)
    return xla.attend(query_RNC, keys_RkC, listed_Rk, scale=scale, rank=rank)


def gradient(
    query_RNC: Array,
    keys_RkC: Array,
    listed_Rk: Array,
    d_RNK: Array,
    scale: float,
    rank: int,
    backend: Backend,
) -> tuple[Array, Array]:
    """Gradients of the queries and of each token's listed keys, on one backend."""
    resolve("sparse_attention", backend, GRADIENT_KINDS, "gradient")
    if query_RNC.shape[0] == 0 or keys_RkC.shape[1] == 0:
        return jnp.zeros_like(query_RNC), jnp.zeros_like(keys_RkC)
    arrays = query_RNC, keys_RkC, listed_Rk, d_RNK
    if backend.kind == "tpu":
        return pallas_tpu.gradient(*arrays, scale, rank, backend.interpret)
    return xla.gradient(*arrays, scale=scale, rank=rank)
