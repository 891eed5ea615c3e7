"""Mosaic GPU kernel (Hopper): one token a block of threads, its list in fixed blocks of keys.

64 heads are the rows of a `wgmma`. Blocks of keys come by TMA, ascending, into two slots; each of
two warpgroups scores them all and mixes one half of the value columns, so that the mixture fits its
registers. The softmax is online: a block raises the running maximum, and what was summed before is
scaled by exp(old maximum - new maximum). So the bits also depend on the block (`Config.keys`),
whose digest is in the contract; with a block as long as the list they are the twin's.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.errors import KernelError
from pallas_kernels.pinned_matmul.pallas_gpu import NO_LIMIT_KIB, ROWS, check_dtype, smem

WARPGROUPS = 2
"""That compute; each mixes its share of the value columns."""
PART = 128
"""Value columns of one accumulator."""
UNIT = 64
"""Widths are padded with zeros to a multiple of this."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles."""

    keys: int
    """Keys of a block; the order of the softmax's sum follows from it."""
    slots: int
    """Of the ring of blocks."""
    smem_kib: int
    """What a block of threads may hold; Hopper has 227."""

    def __post_init__(self):
        tuned.multiple("keys", self.keys, UNIT)
        tuned.multiple("slots", self.slots, 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call, padded."""

    n_keys: int
    width: int
    rank: int
    keys: int
    slots: int
    scale: float
    staged: bool
    """Weights go to the product by SMEM: the interpreter knows no operand in registers, and on the
    device there is no room."""

    @property
    def n_blocks(self) -> int:
        """Blocks of the list."""
        return self.n_keys // self.keys

    @property
    def parts(self) -> tuple[int, int]:
        """How many accumulators a warpgroup has, and their width."""
        share = self.rank // WARPGROUPS
        part = math.gcd(share, PART)
        return share // part, part

    @property
    def smem_bytes(self) -> int:
        """The query, the ring of keys (bf16) and of masks (f32)."""
        return ROWS * self.width * 2 + self.slots * self.keys * (self.width * 2 + 4)


def attend(
    query_RNC: jax.Array,
    keys_RkC: jax.Array,
    listed_Rk: jax.Array,
    scale: float,
    rank: int,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """See `xla.attend`.

    Raises:
        KernelError: the dtype, more than 64 heads, or tiles that do not fit SMEM.
    """
    check_dtype("sparse_attention", keys_RkC.dtype)
    (_, n_heads, width), n_keys = query_RNC.shape, keys_RkC.shape[1]
    if n_heads > ROWS:
        raise KernelError(
            f"sparse_attention: gpu kernel: {n_heads} heads; at most {ROWS} on one device. Shard "
            "the heads, or ask for 'xla'"
        )
    if config is None:
        config = tuned.load("sparse_attention", "gpu", Config)
        if interpret:  # one block: what the twin computes as a whole
            whole = -(-n_keys // UNIT) * UNIT
            config = dataclasses.replace(config, keys=whole, smem_kib=NO_LIMIT_KIB)
    # A key's first `rank` columns are its value: they are padded apart from the rest.
    value_pad = -rank % (UNIT * WARPGROUPS)
    plan = Plan(
        -(-n_keys // config.keys) * config.keys,
        -(-(max(width, rank + value_pad)) // UNIT) * UNIT,
        rank + value_pad,
        config.keys,
        config.slots,
        scale,
        staged=interpret,
    )
    if plan.smem_bytes > config.smem_kib * 1024:
        raise KernelError(
            f"sparse_attention: gpu kernel: {config.slots} blocks of {config.keys} keys need "
            f"{plan.smem_bytes / 1024:.0f} KiB of SMEM, over {config.smem_kib}; nearest is keys "
            f"{max(UNIT, config.keys // 2 // UNIT * UNIT)}"
        )
    query = _pad(query_RNC, (0, ROWS - n_heads, plan.width - width))
    keys = _pad(keys_RkC, (0, plan.n_keys - n_keys, plan.width - width))
    # 0 where listed; the select keeps whatever an unlisted key scores out of the sums.
    hidden = jnp.where(listed_Rk, jnp.float32(0), jnp.float32(1))
    hidden = jnp.pad(hidden, ((0, 0), (0, plan.n_keys - n_keys)), constant_values=1)
    return _call(query, keys, hidden, plan, interpret)[:, :n_heads, :rank]


def _pad(x: jax.Array, after: tuple[int, ...]) -> jax.Array:
    return jnp.pad(x, [(0, n) for n in after]) if any(after) else x


def _call(query, keys, hidden, plan: Plan, interpret: bool) -> jax.Array:
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((query.shape[0], ROWS, plan.rank), keys.dtype),
        scratch_types={
            "query_smem": smem(ROWS, plan.width),
            "keys_smem": smem(plan.slots, plan.keys, plan.width),
            **({"weight_smem": smem(WARPGROUPS, ROWS, plan.keys)} if plan.staged else {}),
            "hidden_smem": plgpu.SMEM((plan.slots, plan.keys), jnp.float32),
            "arrived": plgpu.Barrier(),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots),
            "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.slots),
        },
        grid=(query.shape[0],),
        grid_names=("token",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="sparse_attention",
    )
    return kernel(query, keys, hidden)


def _kernel(query_ref, keys_ref, hidden_ref, out_ref, *, plan: Plan, **buffers):
    token, wg = lax.axis_index("token"), lax.axis_index("wg")

    @pl.when(wg == WARPGROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _copy(query_ref.at[token], keys_ref.at[token], hidden_ref.at[token], plan, **buffers)

    @pl.when(wg < WARPGROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        n_parts, part = plan.parts
        plgpu.barrier_wait(buffers["arrived"])
        mixed = _mix(plan, wg, **buffers)
        for n, value in enumerate(mixed):
            columns = pl.ds((wg * n_parts + n) * part, part)
            place = out_ref.at[token, :, columns]
            plgpu.store(place, value.astype(out_ref.dtype), optimized=False)


def _copy(
    query_ref,
    keys_ref,
    hidden_ref,
    plan: Plan,
    *,
    query_smem,
    keys_smem,
    hidden_smem,
    arrived,
    full,
    free,
    **_,
) -> None:
    plgpu.copy_gmem_to_smem(query_ref, query_smem, arrived)

    @pl.loop(0, plan.n_blocks)
    def _(k):
        slot, block = lax.rem(k, jnp.int32(plan.slots)), pl.ds(k * plan.keys, plan.keys)

        @pl.when(k >= plan.slots)
        def _():
            plgpu.barrier_wait(free.at[slot])

        plgpu.copy_gmem_to_smem(keys_ref.at[block], keys_smem.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(hidden_ref.at[block], hidden_smem.at[slot], full.at[slot])


def _mix(
    plan: Plan, wg, *, query_smem, keys_smem, hidden_smem, full, free, weight_smem=None, **_
) -> list[jax.Array]:
    """This warpgroup's value columns, in parts."""
    n_parts, part = plan.parts
    by_head = plgpu.Layout.WGMMA.reduce(1)

    def block(k, carry):
        peak, total, *mixed = carry
        slot = lax.rem(k, jnp.int32(plan.slots))
        plgpu.barrier_wait(full.at[slot])
        keys = keys_smem.at[slot]

        def scores(accumulator):
            plgpu.wgmma(accumulator, query_smem, keys.transpose((1, 0)))
            return accumulator[...]

        score = (
            pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((ROWS, plan.keys), jnp.float32))
            * plan.scale
        )
        hidden = plgpu.load(hidden_smem.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
        shown = lax.broadcast_in_dim(hidden, score.shape, [1]) == 0
        score = jnp.where(shown, score, -jnp.inf)
        new = jnp.maximum(peak, score.max(axis=1))
        # A head that has seen no key has no maximum yet: any finite one gives weights of 0.
        finite = jnp.where(new == -jnp.inf, 0.0, new)
        scale = jnp.exp(peak - finite)
        weight = jnp.exp(score - lax.broadcast_in_dim(finite, score.shape, [0]))
        weight = weight.astype(keys_smem.dtype)
        total = total * scale + weight.astype(jnp.float32).sum(axis=1)
        if weight_smem is not None:
            weight_smem[wg] = weight
            plgpu.commit_smem()
            weight = weight_smem.at[wg]
        wide = lax.broadcast_in_dim(scale, (ROWS, part), [0])
        for n in range(n_parts):
            columns = pl.ds((wg * n_parts + n) * part, part)

            def values(accumulator, columns=columns):
                plgpu.wgmma(accumulator, weight, keys.at[:, columns])
                return accumulator[...]

            more = pl.run_scoped(values, plgpu.WGMMAAccumulatorRef((ROWS, part), jnp.float32))
            mixed[n] = mixed[n] * wide + more
        plgpu.barrier_arrive(free.at[slot])
        return (new, total, *mixed)

    def full_of(value, shape, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    start = (
        full_of(-jnp.inf, (ROWS,), by_head),
        full_of(0.0, (ROWS,), by_head),
        *(full_of(0.0, (ROWS, part), plgpu.Layout.WGMMA) for _ in range(n_parts)),
    )
    _, total, *mixed = lax.fori_loop(0, plan.n_blocks, block, start)
    divisor = lax.broadcast_in_dim(jnp.where(total == 0.0, 1.0, total), (ROWS, part), [0])
    return [value / divisor for value in mixed]
