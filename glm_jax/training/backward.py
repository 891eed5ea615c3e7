"""The backward: every layer's regions are transposed from saved inputs.

What belongs to a row (derivatives of the stream, factors of the weight gradients) is computed for
all rows, in tiles of one size; a row's bits do not depend on its company. Sums over rows
are cut in chunks, up to `token_leaf` tokens of one sequence: a chunk's `x^T dy` is one leaf of the
tree (`accumulate`). So no bit of any gradient depends on packing, on the number of microbatches or
on the other sequences. The values that the loss reads are the forward's own; what is recomputed
here only forms derivatives.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
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
from glm_jax.model.moe import Mlp, Moe
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from glm_jax.numerics.primitives import add_rms_norm
from glm_jax.params import leaves
from glm_jax.training import accumulate, experts
from glm_jax.training.accumulate import Counter
from glm_jax.training.attention import listed_mask, mix_vjp
from glm_jax.training.pack import TrainBatch
from glm_jax.training.tape import Factors, Turned, leaf, pull, turned

SAVED = ("residual", "mlp_in", "mlp_out", "query", "latent", "selected", "mixed")
SAVED_SPARSE = ("router_experts", "router_weights")

# The weights and gains of each region in the order of their use, which the tape notes.
PROJECT = tuple(
    ["input_norm"]
    + [f"attention.{x}" for x in ("q_a", "q_a_norm", "q_b", "k_up", "kv_a", "kv_a_norm")]
)
OUTPUT = ("attention.v_up", "attention.o", "post_norm")
DENSE = ("feed_forward.gate_up", "feed_forward.down")
SPARSE = ("feed_forward.router", "feed_forward.shared.gate_up", "feed_forward.shared.down")
HEAD = ("final_norm", "lm_head")
EXPERTS = {"gate_up": "feed_forward.gate_up", "down": "feed_forward.down"}
BY_HEAD = ("attention.k_up", "attention.v_up")


class Saved(NamedTuple):
    """What the forward leaves for the backward."""

    layers: list[Any]
    """For each segment, for each block of its pattern: region outputs, stacked over repeats."""
    embedded_TD: Float[Array, "T D"]


class BlockState(NamedTuple):
    """Gradient sums of a stack of layers."""

    weights: Counter
    """By parameter path; a place a layer `[L]`."""
    experts: Counter
    """Of the routed experts; a place a layer and expert `[L, E]`. Empty in a dense layer."""


class GradientState(NamedTuple):
    """Sums of the gradients so far. Start with `initial`, end with `gradients`."""

    segments: list[list[BlockState]]
    head: Counter
    embed_VD: Float[Array, "V D"]


def train_forward(
    model: GlmModel, train: TrainBatch, contract: NumericsContract
) -> tuple[Float[Array, "T"], Saved]:
    """Log-probabilities of the targets by the one forward, and what the backward needs."""
    cache = LatentCache.empty(model.cfg, train.n_slots, train.max_length, contract=contract)
    # The backward reads lists of selected keys; native arithmetic would attend under a mask.
    gathered = None if contract.pinned else True
    out = forward(model, train.batch, cache, taps=True, gathered=gathered)
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
            names = (name for name in (*SAVED, *SAVED_SPARSE) if name in taps[0])
            blocks.append({name: jnp.stack([t[name] for t in taps]) for name in names})
        layers.append(blocks)
        first += period * repeats
    return scores.target_T, Saved(layers, out.taps["model"]["embed"])


def initial(model: GlmModel, chunk_bits: int, sequence_bits: int) -> GradientState:
    """No gradient yet, with room for `2^sequence_bits` sequences of `2^chunk_bits` chunks."""
    room = chunk_bits, sequence_bits
    return GradientState(
        [[_initial(block, room) for block in segment.blocks] for segment in model.segments],
        accumulate.empty({name: x.shape for name, x in _head(model).items()}, *room),
        jnp.zeros(model.embed.shape, jnp.float32),
    )


def _initial(block: Block, room: tuple[int, int]) -> BlockState:
    params = _params(block)
    n_layers, n_experts = params["input_norm"].shape[0], 0
    of_experts: dict[str, tuple[int, ...]] = {}
    if isinstance(block.feed_forward, Moe):
        n_experts = block.cfg.n_routed_experts
        for name, path in EXPERTS.items():
            _, _, rows, *columns = params.pop(path).shape
            of_experts[name] = (rows, _product(columns))
    weights = {path: x.shape[1:] for path, x in params.items()}
    return BlockState(
        accumulate.empty(weights, *room, (n_layers,)),
        accumulate.empty(of_experts, *room, (n_layers, n_experts)),
    )


def trained(model: GlmModel) -> dict[str, Array]:
    """The parameters that `gradients` has an entry for, by the same paths."""
    paths = {"embed", *HEAD}
    for s, segment in enumerate(model.segments):
        for b, block in enumerate(segment.blocks):
            paths |= {f"segments.{s}.blocks.{b}.{path}" for path in _params(block)}
    return {path: variable[...] for path, variable in leaves(model) if path in paths}


def gradients(model: GlmModel, state: GradientState) -> dict[str, Array]:
    """The summed gradients by parameter path, f32. What no loss reaches is absent."""
    named: dict[str, Array] = {"embed": state.embed_VD}
    named |= accumulate.total(state.head)
    for s, blocks in enumerate(state.segments):
        for b, block in enumerate(blocks):
            lead, params = f"segments.{s}.blocks.{b}.", _params(model.segments[s].blocks[b])
            named |= {lead + path: x for path, x in accumulate.total(block.weights).items()}
            for name, x in accumulate.total(block.experts).items():
                named[lead + EXPERTS[name]] = x.reshape(params[EXPERTS[name]].shape)
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
    walk = _Walk(model, train, contract)
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
    return GradientState(segments, head, embed_VD)


def _params(block: Block) -> dict[str, Any]:
    """What of a block is trained, by path: not the indexer, whose selection has no gradient."""
    return {
        path: variable
        for path, variable in leaves(block)
        if isinstance(variable, nnx.Param) and not path.startswith("indexer.")
    }


def _head(model: GlmModel) -> dict[str, Array]:
    return {"final_norm": model.final_norm[...], "lm_head": model.lm_head[...]}


def _product(sizes: list[int]) -> int:
    return sizes[0] if len(sizes) == 1 else sizes[0] * _product(sizes[1:])


class _Walk:
    """One backward pass over a batch."""

    def __init__(self, model, train: TrainBatch, contract: NumericsContract):
        self.model, self.train = model, train
        self.cfg, self.contract = model.cfg, contract
        one_size = dataclasses.replace(
            contract,
            row_tiles=(contract.backward_row_tile,),
            expert_tiles=(contract.backward_expert_tile,),
        )
        self.ops = Arithmetic(one_size)
        self.chunk = contract.token_leaf
        # Rows past the end, so that the last chunk and the last sequence can be sliced whole.
        self.spare = max(self.chunk, train.max_length)
        self.n_used = train.batch.n_used
        cos, sin = rope_table(train.max_length, self.cfg.qk_rope_head_dim, self.cfg.rope_theta)
        position_T = train.batch.positions_T
        self.angles = jnp.asarray(cos)[position_T], jnp.asarray(sin)[position_T]

    def pull(self, region, rows, given, d_out) -> tuple[Any, list[Factors]]:
        """Transposes `region(ops, rows, given)` for all rows; `given` has no derivative."""

        def tile(rows, given, d_out):
            return pull(self.contract, lambda ops, r: region(ops, r, given), rows, d_out)

        n = self.train.batch.n_tokens
        args = (rows, given, d_out)
        if more := self.ops.bucket(n) - n:
            args = jax.tree.map(lambda x: _pad(x, more), args)
        out = self.ops.rows(tile, self.n_used, *args)
        return jax.tree.map(lambda x: x[:n], out) if more else out

    def cut(self, i, tree, axis=0):
        """Chunk `i` of the rows along an axis; rows after its length are zeros."""
        start = self.train.start_n[i]
        mine = jnp.arange(self.chunk, dtype=jnp.int32) < self.train.length_n[i]

        def rows(x):
            return _keep(mine, lax.dynamic_slice_in_dim(x, start, self.chunk, axis), axis=axis)

        return jax.tree.map(rows, tree), mine

    def pad(self, tree):
        """The batch's rows and spare ones, to be cut in chunks."""
        return jax.tree.map(lambda x: _pad(x, self.spare), tree)

    def paste(self, i, whole, part, mine):
        """Stores chunk rows; rows that are not the chunk's keep what they hold."""
        start = self.train.start_n[i]

        def rows(x, p):
            old = lax.dynamic_slice_in_dim(x, start, self.chunk, 0)
            return lax.dynamic_update_slice_in_dim(x, _keep(mine, p.astype(x.dtype), old), start, 0)

        return jax.tree.map(rows, whole, part)

    def sum_leaves(self, factors: dict[str, Factors], params, counter: Counter, layer):
        """Adds a leaf a chunk for each of the named weights of a layer."""
        parts = {p: turned(self.pad(rows), p in BY_HEAD) for p, rows in factors.items()}

        def leaf_of(i):
            new = {}
            for path, (x, dy) in parts.items():
                part = Turned(self.cut(i, x, axis=-1)[0], self.cut(i, dy, axis=-2)[0])
                new[path] = leaf(part, params[path].shape)
            return self.train.index_n[i], new

        return accumulate.extend(counter, leaf_of, 0, self.train.n_chunks, (layer,))

    def head(self, stream, d_logprob_T, counter: Counter):
        """Transposes final norm, head and log-softmax; logits are held for one chunk at a time."""
        params = _head(self.model)

        def region(ops, rows, given, mine):
            (residual_RD, branch_RD), (target_R, shaping_R) = rows, given
            hidden_RD, _ = add_rms_norm(
                ops, residual_RD, branch_RD, params["final_norm"], self.cfg.rms_norm_eps
            )
            raw_RV = ops.matmul(hidden_RD, params["lm_head"], out=jnp.float32)
            id_V = jnp.arange(raw_RV.shape[1], dtype=jnp.int32)
            logits_RV = shape_logits(raw_RV, id_V, _unshaped_where(~mine, shaping_R))
            chosen_R = jnp.take_along_axis(logits_RV, target_R[:, None], axis=1)[:, 0]
            return chosen_R - jax.nn.logsumexp(logits_RV, axis=-1)

        padded = self.pad((stream, (self.train.targets_T, self.train.shaping), d_logprob_T))

        def body(i, carry):
            counter, d_rows = carry
            (rows, given, d_out), mine = self.cut(i, padded)
            d_part, factors = pull(
                self.contract, lambda ops, r: region(ops, r, given, mine), rows, d_out
            )
            new = {
                name: leaf(turned(_wide(part), False), params[name].shape)
                for name, part in zip(HEAD, factors, strict=True)
            }
            counter = accumulate.push(counter, self.train.index_n[i], new)
            return counter, self.paste(i, d_rows, d_part, mine)

        zero = self.pad(jax.tree.map(jnp.zeros_like, stream))
        counter, d_rows = lax.fori_loop(0, self.train.n_chunks, body, (counter, zero))
        n = self.train.batch.n_tokens
        return jax.tree.map(lambda x: x[:n], d_rows), counter

    def segment(self, segment, first, saved, d_stream, states):
        """Transposes a segment's layers, last to first."""
        graphdef, stacked = nnx.split(segment.blocks)
        # A block's input stream is what the block before it left.
        ends = [(block["residual"], block["mlp_out"]) for block in saved]
        shifted = jax.tree.map(
            lambda head, tail: jnp.concatenate([head[None], tail[:-1]]), first, ends[-1]
        )
        starts = [shifted, *ends[:-1]]

        def repeat(carry, scanned):
            # The sums are carried, not scanned: what is scanned is copied in and out.
            d_stream, states = carry
            params, saved, starts, layer = scanned
            blocks, states = nnx.merge(graphdef, params), list(states)
            for b in reversed(range(len(saved))):
                d_stream, states[b] = self.block(
                    blocks[b], starts[b], saved[b], d_stream, states[b], layer
                )
            return (d_stream, states), None

        layers = jnp.arange(segment.layout.repeats, dtype=jnp.int32)
        scanned = (stacked, saved, starts, layers)
        (d_stream, states), _ = lax.scan(repeat, (d_stream, list(states)), scanned, reverse=True)
        return d_stream, states

    def block(self, block: Block, start, saved, d_stream, state: BlockState, layer):
        """Transposes one layer: feed-forward, output, mixing, projections."""
        eps = self.cfg.rms_norm_eps
        params = _params(block)

        def output(ops, rows, _):
            residual_RD, branch_RD, mixed_RNK = rows
            residual_RD = (residual_RD.astype(jnp.float32) + branch_RD.astype(jnp.float32)).astype(
                residual_RD.dtype
            )
            attended_RD = block.attention.output(ops, mixed_RNK)
            return add_rms_norm(ops, residual_RD, attended_RD, block.post_norm[...], eps)

        def project(ops, rows, angles):
            residual_RD, branch_RD = rows
            x_RD, _ = add_rms_norm(ops, residual_RD, branch_RD, block.input_norm[...], eps)
            projected = block.attention.project(ops, x_RD, angles)
            return projected.query_RNC, projected.latent_RC

        d_residual, d_out = d_stream
        d_y, factors, state = self.feed_forward(block, saved, d_out, state, layer)
        d_rows, noted = self.pull(output, (*start, saved["mixed"]), (), (d_y, d_residual))
        factors |= dict(zip(OUTPUT, noted, strict=True))
        d_query, d_latent = self.mixing(saved, d_rows[2])
        d_start, noted = self.pull(project, start, self.angles, (d_query, d_latent))
        factors |= dict(zip(PROJECT, noted, strict=True))
        factors = {path: _wide(part) for path, part in factors.items()}
        weights = self.sum_leaves(factors, params, state.weights, layer)
        d_stream = (d_rows[0] + d_start[0], d_rows[1] + d_start[1])
        return d_stream, state._replace(weights=weights)

    def feed_forward(self, block: Block, saved, d_out, state: BlockState, layer):
        """Transposes a layer's feed-forward; routed experts add their own leaves."""
        feed, y_TD = block.feed_forward, saved["mlp_in"]
        if isinstance(feed, Mlp):
            d_y, noted = self.pull(lambda ops, y, _: feed(ops, y), y_TD, (), d_out)
            return d_y, dict(zip(DENSE, noted, strict=True)), state
        ids_Tk = saved["router_experts"]
        d_y, d_gates, counter = experts.experts_vjp(
            feed,
            self.ops,
            self.train,
            y_TD,
            ids_Tk,
            saved["router_weights"],
            d_out,
            state.experts,
            layer,
        )

        def routed(ops, y_RD, ids_Rk):
            return feed.gates(ops, y_RD, ids_Rk), feed.shared(ops, y_RD)

        d_more, noted = self.pull(routed, y_TD, ids_Tk, (d_gates, d_out))
        state = state._replace(experts=counter)
        return d_y + d_more, dict(zip(SPARSE, noted, strict=True)), state

    def mixing(self, saved, d_mixed_TNK):
        """Gradients of queries and latents of a layer's mixing."""
        train, n_keys = self.train, self.train.max_length
        latent = _pad(saved["latent"], self.spare)
        rows = self.pad((saved["query"], saved["selected"], d_mixed_TNK))
        # A chunk meets the keys up to its own rows: the narrowest product that holds them.
        widths = [*itertools.takewhile(lambda w: w < n_keys, _doubling(self.chunk)), n_keys]

        def body(i, carry):
            d_query, d_latent = carry
            (query, ids, d_out), mine = self.cut(i, rows)
            origin = train.origin_n[i]
            # The chunk's own rows are the sequence's last so far: what follows is nobody's key.
            reach = train.start_n[i] + train.length_n[i] - origin

            def over(width):
                keys = lax.dynamic_slice_in_dim(latent, origin, width, 0)
                keys = _keep(jnp.arange(width, dtype=jnp.int32) < reach, keys)
                listed = listed_mask(ids, width, reach) & mine[:, None]
                d_q, d_k = mix_vjp(query, keys, listed, d_out, self.cfg.softmax_scale)
                return d_q, _pad(d_k, n_keys - width)

            which = sum((reach > width).astype(jnp.int32) for width in widths[:-1])
            d_q, d_k = lax.switch(which, [functools.partial(over, width) for width in widths])
            in_reach = jnp.arange(n_keys, dtype=jnp.int32) < reach
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
        rows = self.pad((d_TD, self.train.batch.ids_T))

        def body(i, embed_VD):
            (d_RD, id_R), mine = self.cut(i, rows)
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


def _wide(factors: Factors) -> Factors:
    """Factors of one dtype: the derivative of a product in f32 is not rounded to bf16."""
    x, dy = factors
    if x.dtype != dy.dtype:
        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    return Factors(x, dy)


def _doubling(n: int) -> Iterator[int]:
    while True:
        yield n
        n *= 2


def _pad(x: Array, n: int) -> Array:
    return jnp.concatenate([x, jnp.zeros((n, *x.shape[1:]), x.dtype)])


def _keep(mine: Array, x: Array, other: Array | None = None, axis: int = 0) -> Array:
    mask = mine.reshape(-1, *(1,) * (x.ndim - 1 - axis % x.ndim))
    return jnp.where(mask, x, jnp.zeros((), x.dtype) if other is None else other)
