"""Mosaic TPU kernel: tiles of rows in parallel, the vocabulary block by block.

A step multiplies a tile of rows with one block of the head and joins the logits to what the rows
have seen, which waits in VMEM scratch. The head is read once a tile of rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuned
from pallas_kernels.errors import KernelError
from pallas_kernels.head_logprob import xla
from pallas_kernels.pinned_matmul.order import Order
from pallas_kernels.pinned_matmul.pallas_tpu import LANES, SUBLANES, leaves_product


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles; no bit depends on them."""

    row_tiles: tuple[int, ...]
    """Rows a tile; the smallest that holds all rows, else the largest."""
    vmem_mib: int
    """What blocks, scratch and temporaries may take."""

    def __post_init__(self):
        if not self.row_tiles or list(self.row_tiles) != sorted(set(self.row_tiles)):
            raise KernelError(f"row_tiles {self.row_tiles}: must be ascending, different sizes")
        for tile in self.row_tiles:
            tuned.multiple("row_tiles", tile, SUBLANES)
        tuned.multiple("vmem_mib", self.vmem_mib, 1)


def score(
    hidden_RD: jax.Array,
    w_DV: jax.Array,
    target_R1: jax.Array,
    *,
    top: int,
    block: int,
    order: Order,
    interpret: bool,
    config: Config | None = None,
) -> tuple[jax.Array, ...]:
    """See `xla.score`.

    Raises:
        KernelError: the vocabulary or the block is no multiple of 128, or a tile does not fit VMEM.
    """
    config = config or tuned.load("head_logprob", "tpu", Config)
    (n_rows, width), n_ids = hidden_RD.shape, w_DV.shape[1]
    for name, size in (("vocabulary", n_ids), ("block", block)):
        if size % LANES:
            raise KernelError(
                f"head_logprob: tpu kernel: {name} {size}: must be a multiple of {LANES}; nearest "
                f"is {max(LANES, round(size / LANES) * LANES)}"
            )
    tile = next((t for t in config.row_tiles if t >= n_rows), config.row_tiles[-1])
    need = vmem_bytes(tile, width, block, top, hidden_RD.dtype.itemsize)
    if need > config.vmem_mib * 2**20:
        raise KernelError(
            f"head_logprob: row tile {tile} and block {block} of width {width} need "
            f"{need / 2**20:.1f} MiB of VMEM, over vmem_mib {config.vmem_mib}; nearest is row tile "
            f"{max(SUBLANES, tile // 2)} or block {max(LANES, block // 2 // LANES * LANES)}"
        )
    n_blocks, last = -(-n_ids // block), (n_ids - block) // LANES

    def by_row(width):
        return pl.BlockSpec((tile, width), lambda i, j: (i, 0))

    # The last block reaches back, so blocks begin at any multiple of a register's width.
    head = pl.BlockSpec(
        (pl.Element(width), pl.Element(block)),
        lambda i, j: (0, jnp.minimum(j * (block // LANES), last) * LANES),
    )
    widths = (1, 1, top, top) if top else (1, 1)
    dtypes = (jnp.float32, jnp.float32, jnp.float32, jnp.int32)
    carry = [pltpu.VMEM(x.shape, x.dtype) for x in _shapes(tile, top)]
    return tuple(
        pl.pallas_call(
            functools.partial(
                _kernel, top=top, block=block, n_ids=n_ids, order=order, n_out=len(widths)
            ),
            grid=(pl.cdiv(n_rows, tile), n_blocks),
            in_specs=[by_row(width), head, by_row(1)],
            out_specs=[by_row(w) for w in widths],
            out_shape=[
                jax.ShapeDtypeStruct((n_rows, w), d) for w, d in zip(widths, dtypes, strict=False)
            ],
            scratch_shapes=carry,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"),
                vmem_limit_bytes=config.vmem_mib * 2**20,
            ),
            interpret=interpret,
            name="head_logprob",
        )(hidden_RD, w_DV, target_R1)
    )


def _shapes(tile: int, top: int) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(jax.eval_shape(lambda: xla.start(tile, top)))


def _kernel(hidden_ref, w_ref, target_ref, *refs, top, block, n_ids, order, n_out):
    outs, scratch = refs[:n_out], refs[n_out:]
    j, n_blocks = pl.program_id(1), -(-n_ids // block)

    def write(carry):
        for ref, value in zip(scratch, jax.tree.leaves(carry), strict=True):
            ref[...] = value

    @pl.when(j == 0)
    def _():
        write(xla.start(hidden_ref.shape[0], top))

    width = hidden_ref.shape[1]
    n_leaves = -(-width // order.k_leaf)
    last_width = width - (n_leaves - 1) * order.k_leaf
    logit_RB = leaves_product(hidden_ref, w_ref, n_leaves, last_width, order.k_leaf, "nn", order)
    carry = xla.Carry(*(ref[...] for ref in scratch), *(() if top else (None, None)))
    first = jnp.minimum(j * block, n_ids - block)
    carry = xla.add_block(carry, logit_RB, first, j * block, target_ref[...])
    write(carry)

    @pl.when(j == n_blocks - 1)
    def _():
        for ref, value in zip(outs, xla.finish(carry), strict=True):
            ref[...] = value


def vmem_bytes(tile: int, width: int, block: int, top: int, item: int) -> int:
    """Double-buffered blocks, and the f32 values of one step."""
    blocks = (tile + block) * width * item
    return 2 * blocks + (8 if top else 5) * tile * block * 4
