"""Mosaic TPU kernel: marks the selected entries of a few rows, which stay in VMEM throughout.

Long rows are cut in chunks, each a row to the kernel; the entries that chunks select are again a
row, and so on until one chunk holds them. That is exact: what is among the first k of a row is
among the first k of its chunk, and the order of columns, by which ties are broken, is kept.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuned
from pallas_kernels.errors import KernelError
from pallas_kernels.top_k_select.xla import mask_to_ids

LOWEST = -(2**31)
"""The sign bit: subtracting it maps unsigned integers to signed ones in order."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles; no bit depends on them."""

    row_tile: int
    chunk: int
    """Most columns a row; at least twice k."""
    vmem_mib: int
    """What blocks and temporaries may take."""

    def __post_init__(self):
        tuned.multiple("row_tile", self.row_tile, 8)
        tuned.multiple("chunk", self.chunk, 128)
        tuned.multiple("vmem_mib", self.vmem_mib, 1)


def select(
    scores_TS: jax.Array, k: int, interpret: bool, config: Config | None = None
) -> jax.Array:
    """Ids `[T, k]` for `S > k`, as `op.forward`.

    Raises:
        KernelError: `k` is too large for a chunk, or a tile does not fit VMEM.
    """
    config = config or tuned.load("top_k_select", "tpu", Config)
    n_rows, n_keys = scores_TS.shape
    if n_keys <= config.chunk:
        return mask_to_ids(_mask(scores_TS, k, interpret, config), k)
    if 2 * k > config.chunk:
        raise KernelError(
            f"top_k_select: k {k} of {n_keys} keys: must be at most half of chunk {config.chunk}; "
            f"nearest is {config.chunk // 2}"
        )
    n_chunks = -(-n_keys // config.chunk)
    # What is added has the largest ids and the lowest score, so it loses every tie.
    pad = ((0, 0), (0, n_chunks * config.chunk - n_keys))
    scores = jnp.pad(scores_TS, pad, constant_values=-jnp.inf)
    mask = _mask(scores.reshape(n_rows * n_chunks, config.chunk), k, interpret, config)
    own = mask_to_ids(mask, k).reshape(n_rows, n_chunks, k)
    first = jnp.arange(n_chunks, dtype=jnp.int32)[None, :, None] * config.chunk
    ids_Tm = (own + first).reshape(n_rows, n_chunks * k)
    kept_Tm = jnp.take_along_axis(scores, ids_Tm, axis=1, mode="clip")
    place_Tk = select(kept_Tm, k, interpret, config)
    return jnp.take_along_axis(ids_Tm, place_Tk, axis=1, mode="clip")


def _mask(scores_MS: jax.Array, k: int, interpret: bool, config: Config) -> jax.Array:
    n_rows, n_keys = scores_MS.shape
    need = vmem_bytes(config.row_tile, n_keys)
    if need > config.vmem_mib * 2**20:
        most = config.vmem_mib * 2**20 * n_keys // need // 128 * 128
        raise KernelError(
            f"top_k_select: row_tile {config.row_tile} of {n_keys} columns needs "
            f"{need / 2**20:.1f} MiB of VMEM, over vmem_mib {config.vmem_mib}; nearest is chunk "
            f"{most}"
        )
    block = pl.BlockSpec((config.row_tile, n_keys), lambda i: (i, 0))
    marked = pl.pallas_call(
        functools.partial(_kernel, k=k),
        grid=(pl.cdiv(n_rows, config.row_tile),),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((n_rows, n_keys), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_mib * 2**20
        ),
        interpret=interpret,
        name="top_k_select",
    )(scores_MS)
    return marked != 0


def _kernel(scores_ref, marked_ref, *, k: int):
    key_RS = _signed_key(scores_ref[...])
    n_rows, n_keys = key_RS.shape

    def count(mask_RS):
        # Exact below 2^24, and an f32 sum is what a TPU reduces fastest.
        return jnp.sum(jnp.where(mask_RS, 1.0, 0.0), axis=1, keepdims=True)

    def refine(i, threshold_R1):
        """The next bit of the k-th largest key, from the highest on."""
        trial_R1 = threshold_R1 | jnp.left_shift(jnp.int32(1), 31 - i)
        enough = count(key_RS >= (trial_R1 ^ LOWEST)) >= k
        return jnp.where(enough, trial_R1, threshold_R1)

    none_R1 = jnp.zeros((n_rows, 1), jnp.int32)
    kth_R1 = lax.fori_loop(0, 32, refine, none_R1) ^ LOWEST
    above_RS, tied_RS = key_RS > kth_R1, key_RS == kth_R1
    left_R1 = k - count(above_RS)
    column_RS = lax.broadcasted_iota(jnp.int32, key_RS.shape, 1)
    n_bits = n_keys.bit_length()

    def grow(i, end_R1):
        """The next bit of the column before which tied entries are taken."""
        trial_R1 = end_R1 + jnp.left_shift(jnp.int32(1), n_bits - 1 - i)
        fit = count(tied_RS & (column_RS < trial_R1)) <= left_R1
        return jnp.where(fit, trial_R1, end_R1)

    end_R1 = lax.fori_loop(0, n_bits, grow, none_R1)
    marked = above_RS | (tied_RS & (column_RS < end_R1))
    marked_ref[...] = marked.astype(jnp.int32)


def _signed_key(scores: jax.Array) -> jax.Array:
    """`xla.order_key` less 2^31: an integer whose order is that of the scores."""
    scores = jnp.where(scores == 0.0, 0.0, scores)
    scores = jnp.where(scores != scores, -jnp.inf, scores)
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def vmem_bytes(row_tile: int, n_keys: int) -> int:
    """Double-buffered blocks, and keys, columns and masks of a tile."""
    return (4 + 4) * row_tile * n_keys * 4
