"""The forward: one function for prompt reading, generation, scoring and training."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache, causal_mask, page_rows
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.model.context import Context, Taps
from glm_jax.numerics.arithmetic import Arithmetic, native
from glm_jax.numerics.contract import NumericsContract, require_same
from glm_jax.numerics.primitives import rope_angles

MASKED_UP_TO = 8
"""Native arithmetic attends under a mask while there are at most this many times `index_topk`
keys: up to there the dense product is cheaper than gathering each row's list."""


class ForwardOutput(NamedTuple):
    """Result of a forward."""

    hidden_TD: Float[Array, "T D"]
    """After the final norm."""
    cache: LatentCache | None
    taps: dict[str, Taps]
    """Intermediate values by layer name; empty unless asked for."""


def forward(
    model: GlmModel,
    batch: TokenBatch,
    cache: LatentCache | None = None,
    *,
    contract: NumericsContract | None = None,
    taps: bool = False,
    gathered: bool | None = None,
) -> ForwardOutput:
    """Runs the model over a batch of tokens.

    Args:
        model: the parameters.
        batch: the tokens; padding changes nothing.
        cache: keys of the past, to which the batch's own are added. None: attend within the batch
            only, in native arithmetic.
        contract: the numerics asked for. Default: the cache's; native without a cache.
        taps: also return intermediate values.
        gathered: native arithmetic: force attention over gathered lists (True) or under a mask.

    Raises:
        GlmError: the cache was written under another contract; pinned numerics without a cache.
    """
    ops = arithmetic(cache, contract)
    padded = batch.padded(ops.bucket(batch.n_tokens))
    context = make_context(model, padded, cache, ops, taps=taps, gathered=gathered)
    return _cut(ForwardOutput(*model.trunk(cache, context)), batch)


def draft(
    model: GlmModel,
    batch: TokenBatch,
    hidden_TD: Float[Array, "T D"],
    next_ids_T: Int[Array, "T"],
    cache: LatentCache | None = None,
    *,
    contract: NumericsContract | None = None,
    taps: bool = False,
    gathered: bool | None = None,
) -> ForwardOutput:
    """Runs the MTP layer: `model.logits(hidden)` of its output predicts two tokens ahead.

    Args:
        model: a model with an MTP layer.
        batch: the same tokens as for the forward (their positions are used, not their ids).
        hidden_TD: the forward's output, or the previous draft step's.
        next_ids_T: the token after each row's.
        cache: as for the forward.
        contract: as for the forward.
        taps: also return intermediate values.
        gathered: as for the forward.

    Raises:
        GlmError: the model has no MTP layer; or as for the forward.
    """
    if model.mtp is None:
        raise GlmError("draft: the model has no MTP layer (num_nextn_predict_layers is 0)")
    ops = arithmetic(cache, contract)
    padded = batch.padded(ops.bucket(batch.n_tokens))
    extra = padded.n_tokens - batch.n_tokens
    context = make_context(model, padded, cache, ops, taps=taps, gathered=gathered)
    next_TD = model.embed[...][jnp.pad(next_ids_T, (0, extra))]
    hidden_TD = jnp.pad(hidden_TD, ((0, extra), (0, 0)))
    y_TD, cache, layer_taps = model.mtp(next_TD, hidden_TD, cache, context)
    return _cut(ForwardOutput(y_TD, cache, {"mtp": layer_taps} if taps else {}), batch)


def _cut(output: ForwardOutput, batch: TokenBatch) -> ForwardOutput:
    """Drops the rows that padding to whole tiles added."""
    n = batch.n_tokens
    if output.hidden_TD.shape[0] == n:
        return output
    taps = {
        layer: {name: value[:n] for name, value in values.items()}
        for layer, values in output.taps.items()
    }
    return ForwardOutput(output.hidden_TD[:n], output.cache, taps)


def make_context(
    model: GlmModel,
    batch: TokenBatch,
    cache: LatentCache | None,
    ops: Arithmetic,
    *,
    taps: bool = False,
    gathered: bool | None = None,
) -> Context:
    """Rotation, masks and places in the cache for one forward of a batch of whole tiles."""
    cfg = model.cfg
    # Loops over pages run up to the last position: padding must not lead them past the cache.
    positions_T = jnp.where(batch.valid_T, batch.positions_T, 0)
    batch = dataclasses.replace(batch, positions_T=positions_T)
    if cache is None:
        causal = causal_mask(batch, None)
        angles = rope_angles(batch.positions_T, cfg.qk_rope_head_dim, cfg.rope_theta)
        rows_T = pages_Tp = None
        n_keys = batch.rows
    else:
        causal = None if ops.contract.pinned else causal_mask(batch, cache.capacity)
        angles = cache.cos_SW[batch.positions_T], cache.sin_SW[batch.positions_T]
        rows_T, pages_Tp = page_rows(cache, batch), cache.table_Up[batch.slots_T]
        n_keys = cache.capacity
    if gathered is None:
        gathered = n_keys > MASKED_UP_TO * cfg.index_topk
    return Context(
        batch, angles, batch.n_used, rows_T, pages_Tp, causal, n_keys, ops, gathered, taps
    )


def arithmetic(cache: LatentCache | None, contract: NumericsContract | None) -> Arithmetic:
    """The arithmetic that a cache and a contract agree on.

    Raises:
        GlmError: they do not.
    """
    if cache is None:
        if contract is not None and contract.pinned:
            raise GlmError("forward: pinned numerics need a cache; pass LatentCache.empty(...)")
        return Arithmetic(contract) if contract else native()
    if contract is not None and contract != cache.contract:
        require_same(contract, cache.contract, "cache")
    return Arithmetic(cache.contract)
