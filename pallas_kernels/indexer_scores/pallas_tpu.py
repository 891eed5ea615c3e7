"""Mosaic TPU kernel: one token a step, its pages copied from HBM while those before are scored.

The table of a token's pages stands in SMEM; pages are copied whole, `pages_a_step` at once, into
one of two buffers, up to the step that holds the token's own position.
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
from pallas_kernels.indexer_scores import xla

LANES = 128


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles; no bit depends on them: a product is always of one page."""

    pages_a_step: int
    vmem_mib: int
    """What blocks, buffers and temporaries may take."""

    def __post_init__(self):
        tuned.multiple("pages_a_step", self.pages_a_step, 1)
        tuned.multiple("vmem_mib", self.vmem_mib, 1)


def scores(
    query_RIJ: jax.Array,
    weight_RI: jax.Array,
    pages_LPsJ: jax.Array,
    layer: int | jax.Array,
    table_Rp: jax.Array,
    position_R: jax.Array,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """See `xla.paged_scores`.

    Raises:
        KernelError: a step's keys are no multiple of 128, or a row's scores do not fit VMEM.
    """
    config = config or tuned.load("indexer_scores", "tpu", Config)
    (n_rows, n_heads, width), n_pages = query_RIJ.shape, table_Rp.shape[1]
    size, step = pages_LPsJ.shape[2], config.pages_a_step
    if size * step % LANES:
        raise KernelError(
            f"indexer_scores: tpu kernel: {step} pages of {size} keys a step: must be a multiple "
            f"of {LANES} keys; nearest is pages of {max(1, round(size * step / LANES)) * LANES}"
            f" / {step}"
        )
    n_steps = -(-n_pages // step)
    need = vmem_bytes(n_heads, width, size, step, n_steps, pages_LPsJ.dtype.itemsize)
    if need > config.vmem_mib * 2**20:
        most = config.vmem_mib * 2**20 * n_pages // need
        raise KernelError(
            f"indexer_scores: {n_pages} pages need {need / 2**20:.1f} MiB of VMEM, over vmem_mib "
            f"{config.vmem_mib}; nearest is {most} pages"
        )

    def row(*shape, memory_space=None):
        return pl.BlockSpec(
            (1, *shape), lambda r, *_: (r, *(0,) * len(shape)), memory_space=memory_space
        )

    padded = n_steps * step * size
    kernel = functools.partial(_kernel, step=step, n_steps=n_steps)
    found = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n_rows,),
            in_specs=[
                row(1, n_pages, memory_space=pltpu.SMEM),
                row(n_heads, width),
                row(1, n_heads),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=row(1, padded),
            scratch_shapes=[
                pltpu.VMEM((2, step, size, width), pages_LPsJ.dtype),
                pltpu.SemaphoreType.DMA((2, step)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((n_rows, 1, padded), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_mib * 2**20
        ),
        interpret=interpret,
        name="indexer_scores",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        position_R.astype(jnp.int32),
        table_Rp[:, None, :].astype(jnp.int32),
        query_RIJ,
        weight_RI[:, None, :],
        pages_LPsJ,
    )
    return found[:, 0, : n_pages * size]


def _kernel(
    layer_ref, position_ref, table_ref, query_ref, weight_ref, pages_ref, out_ref, buffer, arrived,
    *, step, n_steps
):  # fmt: skip
    _, n_pages, size, _ = pages_ref.shape
    width, per_step = query_ref.shape[2], step * size
    position = position_ref[pl.program_id(0)]
    precision = lax.Precision.HIGHEST if buffer.dtype == jnp.float32 else None
    # Never past the table, whatever a padding row's position is.
    n_read = jnp.minimum(jnp.maximum(position, 0) // per_step + 1, n_steps)

    def copies(j, slot):
        for i in range(step):
            at = jnp.minimum(j * step + i, table_ref.shape[2] - 1)
            page = jnp.clip(table_ref[0, 0, at], 0, n_pages - 1)
            layer = jnp.clip(layer_ref[0], 0, pages_ref.shape[0] - 1)
            source = pages_ref.at[layer, page]
            yield pltpu.make_async_copy(source, buffer.at[slot, i], arrived.at[slot, i])

    def score(slot, i):
        dot_1Is = xla.product(query_ref[...], buffer[slot, i][None], precision)
        return xla.weigh_heads(dot_1Is, weight_ref[:, 0, :], width)

    def body(j, _):
        slot = lax.rem(j, 2)

        @pl.when(j + 1 < n_read)
        def _():
            for copy in copies(j + 1, 1 - slot):
                copy.start()

        for copy in copies(j, slot):
            copy.wait()
        part = jnp.concatenate([score(slot, i) for i in range(step)], axis=1)
        start = pl.multiple_of(j * per_step, LANES)
        key = j * per_step + lax.broadcasted_iota(jnp.int32, part.shape, 1)
        out_ref[0, :, pl.ds(start, per_step)] = jnp.where(key <= position, part, -jnp.inf)
        return 0

    out_ref[...] = jnp.full(out_ref.shape, -jnp.inf, jnp.float32)
    for copy in copies(0, 0):
        copy.start()
    lax.fori_loop(0, n_read, body, 0)


def vmem_bytes(n_heads: int, width: int, size: int, step: int, n_steps: int, item: int) -> int:
    """Double-buffered rows of queries and scores, the pages, and the products of a step in f32."""
    rows = n_heads * width * item + n_heads * 4 + n_steps * step * size * 4
    return 2 * rows + 2 * step * size * width * item + 2 * n_heads * step * size * 4
