"""The backward: every layer's regions are transposed chunk by chunk from saved inputs.

A chunk is up to `token_leaf` tokens of one sequence, in a tile of fixed shape. Its weight gradients
are one leaf of the tree (`accumulate`); its row gradients depend on its own sequence only. So no
bit of any gradient depends on packing, on the number of microbatches or on the other sequences. The
values that the loss reads are the forward's own; what is recomputed here only forms derivatives.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from glm_jax.cache import LatentCache, rope_table
from glm_jax.forward import forward
from glm_jax.head import Shaping, score, shape_logits
from glm_jax.model import GlmModel
from glm_jax.model.block import Block
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from glm_jax.numerics.primitives import add_rms_norm
from glm_jax.params import leaves
from glm_jax.training import accumulate
from glm_jax.training.attention import listed_mask, mix_vjp
from glm_jax.training.pack import TrainBatch

SAVED = ("residual", "mlp_out", "query", "latent", "selected", "mixed")


class Saved(NamedTuple):
    """What the forward leaves for the backward."""

    layers: list[Any]
    """For each segment, for each block of its pattern: region outputs, stacked over repeats."""
    embedded_TD: Float[Array, "T D"]


class GradientState(NamedTuple):
    """Sums of the gradients so far. Start with `initial`, end with `gradients`."""

    segments: list[Any]
    head: Any
    embed_VD: Float[Array, "V D"]
    n_chunks: Array
    """Chunks so far."""


def train_forward(
    model: GlmModel, train: TrainBatch, contract: NumericsContract
) -> tuple[Float[Array, "T"], Saved]:
    """Log-probabilities of the targets by the one forward, and what the backward needs."""
    cache = LatentCache.empty(model.cfg, train.n_slots, train.max_length, contract=contract)
    out = forward(model, train.batch, cache, taps=True)
    ops = Arithmetic(contract)
    scores = score(
        model, ops, out.hidden_TD, train.targets_T, train.batch.n_used, shaping=train.shaping
    )
    layers, first = [], 0
    for segment in model.segments:
        period, repeats = len(segment.layout.pattern), segment.layout.repeats
        blocks = []
        for i in range(period):
            taps = [out.taps[f"layer{first + r * period + i}"] for r in range(repeats)]
            blocks.append({name: jnp.stack([t[name] for t in taps]) for name in SAVED})
        layers.append(blocks)
        first += period * repeats
    return scores.target_T, Saved(layers, out.taps["model"]["embed"])


def initial(model: GlmModel, n_levels: int) -> GradientState:
    """No gradient yet, with room for `2^n_levels - 1` chunks."""
    segments = [
        [accumulate.empty(_split(block)[2:4], n_levels, lead=1) for block in segment.blocks]
        for segment in model.segments
    ]
    head = accumulate.empty(_head_params(model), n_levels)
    embed = jnp.zeros(model.embed.shape, jnp.float32)
    return GradientState(segments, head, embed, jnp.int32(0))


def gradients(model: GlmModel, state: GradientState) -> dict[str, Array]:
    """The summed gradients by parameter path, f32. What no loss reaches is absent."""
    named: dict[str, Array] = {"embed": state.embed_VD}
    head = accumulate.total(state.head, state.n_chunks)
    named["final_norm"], named["lm_head"] = head["final_norm"], head["lm_head"]
    for s, blocks in enumerate(state.segments):
        for b, levels in enumerate(blocks):
            summed = accumulate.total(levels, state.n_chunks, lead=1)
            for half in summed:
                for name, variable in leaves(half):
                    named[f"segments.{s}.blocks.{b}.{name}"] = variable[...]
    return named


def backward(
    model: GlmModel,
    train: TrainBatch,
    saved: Saved,
    d_logprob_T: Float[Array, "T"],
    state: GradientState,
    contract: NumericsContract,
) -> GradientState:
    """Adds a batch's gradients, given the derivative of the loss by each log-probability."""
    walk = _Walk(model, train, contract, state.n_chunks)
    last = saved.layers[-1][-1]
    stream = (last["residual"][-1], last["mlp_out"][-1])
    d_stream, head = walk.head(stream, d_logprob_T, state.head)
    segments: list[Any] = [None] * len(model.segments)
    for s in reversed(range(len(model.segments))):
        before = saved.layers[s - 1][-1] if s else None
        first = (
            (before["residual"][-1], before["mlp_out"][-1])
            if before
            else (saved.embedded_TD, jnp.zeros_like(saved.embedded_TD))
        )
        d_stream, segments[s] = walk.segment(
            model.segments[s], first, saved.layers[s], d_stream, state.segments[s]
        )
    embed_VD = walk.embed(d_stream[0], state.embed_VD)
    return GradientState(segments, head, embed_VD, state.n_chunks + train.n_chunks)


BEFORE_MIXING = ("input_norm", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "k_up")


def _frozen(path: tuple, _: Any) -> bool:
    """The indexer: its selection has no gradient."""
    return "indexer" in path


def _before_mixing(path: tuple, variable: Any) -> bool:
    return path[-1] in BEFORE_MIXING and isinstance(variable, nnx.Param)


def _split(block: Block) -> tuple[Any, ...]:
    """Graph, indexer, parameters before the mixing, those after it, and the rest."""
    return nnx.split(block, _frozen, _before_mixing, nnx.Param, ...)


def _head_params(model: GlmModel) -> dict[str, Array]:
    return {"final_norm": model.final_norm[...], "lm_head": model.lm_head[...]}


class _Walk:
    """One backward pass over a batch: its chunks, and how a region is transposed over them."""

    def __init__(self, model, train: TrainBatch, contract: NumericsContract, count):
        self.model, self.train, self.count = model, train, count
        self.cfg, self.ops = model.cfg, Arithmetic(contract)
        self.leaf = contract.token_leaf
        # Rows past the end, so that the last chunk and the last sequence can be sliced whole.
        self.spare = max(self.leaf, train.max_length)
        cos, sin = rope_table(train.max_length, self.cfg.qk_rope_head_dim, self.cfg.rope_theta)
        position_T = train.batch.positions_T
        self.angles = jnp.asarray(cos)[position_T], jnp.asarray(sin)[position_T]

    def cut(self, i, tree):
        """Rows of chunk `i`, `[leaf, ...]`; rows after its length are zeros."""
        start = self.train.start_n[i]
        mine = jnp.arange(self.leaf, dtype=jnp.int32) < self.train.length_n[i]

        def rows(x):
            part = lax.dynamic_slice_in_dim(_pad(x, self.spare), start, self.leaf, 0)
            return _keep(mine, part)

        return jax.tree.map(rows, tree), mine

    def paste(self, i, whole, part, mine):
        """Stores chunk rows; rows that are not the chunk's keep what they hold."""
        start = self.train.start_n[i]

        def rows(x, p):
            old = lax.dynamic_slice_in_dim(x, start, self.leaf, 0)
            return lax.dynamic_update_slice_in_dim(x, _keep(mine, p.astype(x.dtype), old), start, 0)

        return jax.tree.map(rows, whole, part)

    def transpose(self, region, params, rows, d_out, levels, given):
        """Transposes `region(params, (rows, given), mine)` over all chunks.

        Returns:
            Gradients of `rows`, and `levels` with a leaf of parameter gradients a chunk. `given`
            (rotation, targets) has no gradient.
        """

        def body(i, carry):
            levels, d_rows = carry
            (part, fixed, d_part), mine = self.cut(i, (rows, given, d_out))
            _, pull = jax.vjp(lambda p, r: region(p, (r, fixed), mine), params, part)
            d_params, d_part = pull(d_part)
            levels = accumulate.push(levels, self.count + i, d_params)
            return levels, self.paste(i, d_rows, d_part, mine)

        zero = jax.tree.map(lambda x: _pad(jnp.zeros_like(x), self.spare), rows)
        levels, d_rows = lax.fori_loop(0, self.train.n_chunks, body, (levels, zero))
        n = self.train.batch.n_tokens
        return jax.tree.map(lambda x: x[:n], d_rows), levels

    def head(self, stream, d_logprob_T, levels):
        """Transposes final norm, head and log-softmax; logits are held for one chunk at a time."""

        def region(params, rows, mine):
            (residual_RD, branch_RD), (target_R, shaping_R) = rows
            hidden_RD, _ = add_rms_norm(
                self.ops, residual_RD, branch_RD, params["final_norm"], self.cfg.rms_norm_eps
            )
            raw_RV = self.ops.matmul(hidden_RD, params["lm_head"], out=jnp.float32)
            id_V = jnp.arange(raw_RV.shape[1], dtype=jnp.int32)
            logits_RV = shape_logits(raw_RV, id_V, _unshaped_where(~mine, shaping_R))
            chosen_R = jnp.take_along_axis(logits_RV, target_R[:, None], axis=1)[:, 0]
            return chosen_R - jax.nn.logsumexp(logits_RV, axis=-1)

        given = (self.train.targets_T, self.train.shaping)
        return self.transpose(region, _head_params(self.model), stream, d_logprob_T, levels, given)

    def segment(self, segment, first, saved, d_stream, levels):
        """Transposes a segment's layers, last to first."""
        graphdef, stacked = nnx.split(segment.blocks)
        # A block's input stream is what the block before it left.
        ends = [(block["residual"], block["mlp_out"]) for block in saved]
        shifted = jax.tree.map(
            lambda head, tail: jnp.concatenate([head[None], tail[:-1]]), first, ends[-1]
        )
        starts = [shifted, *ends[:-1]]

        def repeat(d_stream, scanned):
            params, saved, starts, levels = scanned
            new = []
            blocks = nnx.merge(graphdef, params)
            for b in reversed(range(len(saved))):
                d_stream, block_levels = self.block(
                    blocks[b], starts[b], saved[b], d_stream, levels[b]
                )
                new.insert(0, block_levels)
            return d_stream, new

        scanned = (stacked, saved, starts, levels)
        return lax.scan(repeat, d_stream, scanned, reverse=True)

    def block(self, block: Block, start, saved, d_stream, levels):
        """Transposes one layer: output and feed-forward, mixing, projections."""
        graphdef, indexer, early, late, rest = _split(block)
        eps = self.cfg.rms_norm_eps

        def after(late, rows, mine):
            block = nnx.merge(graphdef, indexer, early, late, rest)
            (residual_RD, branch_RD, mixed_RNK), _ = rows
            residual_RD = (residual_RD.astype(jnp.float32) + branch_RD.astype(jnp.float32)).astype(
                residual_RD.dtype
            )
            return block.after_mixing(self.ops, mixed_RNK, residual_RD, mine)

        def before(early, rows, mine):
            block = nnx.merge(graphdef, indexer, early, late, rest)
            (residual_RD, branch_RD), angles = rows
            x_RD, _ = add_rms_norm(self.ops, residual_RD, branch_RD, block.input_norm[...], eps)
            projected = block.attention.project(self.ops, x_RD, angles)
            return projected.query_RNC, projected.latent_RC

        (d_residual, d_branch, d_mixed), late_levels = self.transpose(
            after, late, (*start, saved["mixed"]), d_stream, levels[1], ()
        )
        d_query, d_latent = self.mixing(saved, d_mixed)
        (d_residual_2, d_branch_2), early_levels = self.transpose(
            before, early, start, (d_query, d_latent), levels[0], self.angles
        )
        d_start = (d_residual + d_residual_2, d_branch + d_branch_2)
        return d_start, (early_levels, late_levels)

    def mixing(self, saved, d_mixed_TNK):
        """Gradients of queries and latents of a layer's mixing."""
        train, n_keys = self.train, self.train.max_length
        latent = _pad(saved["latent"], self.spare)

        def body(i, carry):
            d_query, d_latent = carry
            rows = (saved["query"], saved["selected"], d_mixed_TNK)
            (query, ids, d_out), mine = self.cut(i, rows)
            origin = train.origin_n[i]
            keys = lax.dynamic_slice_in_dim(latent, origin, n_keys, 0)
            # The chunk's own rows are the sequence's last so far: what follows is nobody's key.
            reach = train.start_n[i] + train.length_n[i] - origin
            in_reach = jnp.arange(n_keys, dtype=jnp.int32) < reach
            keys = _keep(in_reach, keys)
            listed = listed_mask(ids, n_keys, reach) & mine[:, None]
            d_q, d_k = mix_vjp(query, keys, listed, d_out, self.cfg.softmax_scale)
            old = lax.dynamic_slice_in_dim(d_latent, origin, n_keys, 0)
            new = _keep(in_reach, old + d_k, old)
            d_latent = lax.dynamic_update_slice_in_dim(d_latent, new, origin, 0)
            return self.paste(i, d_query, d_q, mine), d_latent

        zero_q = _pad(jnp.zeros(saved["query"].shape, jnp.float32), self.spare)
        zero_k = _pad(jnp.zeros(saved["latent"].shape, jnp.float32), self.spare)
        d_query, d_latent = lax.fori_loop(0, train.n_chunks, body, (zero_q, zero_k))
        n, dtype = train.batch.n_tokens, saved["query"].dtype
        return d_query[:n].astype(dtype), d_latent[:n].astype(dtype)

    def embed(self, d_TD, embed_VD):
        """Adds the embedding's gradient: equal ids of a chunk first, in row order, then chunks."""

        def body(i, embed_VD):
            (d_RD, id_R), mine = self.cut(i, (d_TD, self.train.batch.ids_T))
            same_RR = (id_R[:, None] == id_R[None, :]) & mine[:, None] & mine[None, :]
            sum_RD = self.ops.matmul(same_RR.astype(jnp.float32), d_RD.astype(jnp.float32))
            earlier_RR = jnp.tril(same_RR, -1)
            first_R = mine & ~jnp.any(earlier_RR, axis=1)
            place_R = jnp.where(first_R, id_R, embed_VD.shape[0])
            old_RD = embed_VD.at[place_R].get(mode="fill", fill_value=0)
            # Only the first row of each id writes, so the scatter has no order to depend on.
            return embed_VD.at[place_R].set(old_RD + sum_RD, mode="drop")

        return lax.fori_loop(0, self.train.n_chunks, body, embed_VD)


def _unshaped_where(other_R: Array, shaping: Shaping | None) -> Shaping | None:
    """Rows of no chunk get a distribution too: a NaN would outlive its zero derivative."""
    if shaping is None:
        return None
    kept_TW = shaping.kept_TW
    if kept_TW is not None:
        kept_TW = jnp.where(other_R[:, None], jnp.uint32(0xFFFFFFFF), kept_TW)
    return Shaping(jnp.where(other_R, 1.0, shaping.temperature_T), kept_TW)


def _pad(x: Array, n: int) -> Array:
    return jnp.concatenate([x, jnp.zeros((n, *x.shape[1:]), x.dtype)])


def _keep(mine: Array, x: Array, other: Array | None = None) -> Array:
    mask = mine.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(mask, x, jnp.zeros((), x.dtype) if other is None else other)
