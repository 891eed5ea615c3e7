"""The forward: one function for prompt reading, generation, scoring and training."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache, causal_view
from glm_jax.model import GlmModel
from glm_jax.model.block import Context, Taps
from glm_jax.numerics.primitives import rope_angles

MASKED_UP_TO = 8
"""Attend under a mask while there are at most this many times `index_topk` keys: up to there the
dense product is cheaper than gathering each row's list."""


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
    taps: bool = False,
    gathered: bool | None = None,
) -> ForwardOutput:
    """Runs the model over a batch of tokens.

    Args:
        model: the parameters.
        batch: the tokens; padding changes nothing.
        cache: keys of the past. The batch's own are added. None: attend within the batch only.
        taps: also return intermediate values.
        gathered: force attention over gathered lists (True) or under a mask (False).
    """
    context = make_context(model, batch, cache, taps=taps, gathered=gathered)
    return ForwardOutput(*model.trunk(cache, context))


def draft(
    model: GlmModel,
    batch: TokenBatch,
    hidden_TD: Float[Array, "T D"],
    next_ids_T: Int[Array, "T"],
    cache: LatentCache | None = None,
    *,
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
        taps: also return intermediate values.
        gathered: as for the forward.
    """
    if model.mtp is None:
        raise ValueError("draft: the model has no MTP layer (num_nextn_predict_layers is 0)")
    context = make_context(model, batch, cache, taps=taps, gathered=gathered)
    y_TD, cache, layer_taps = model.mtp(model.embed[...][next_ids_T], hidden_TD, cache, context)
    return ForwardOutput(y_TD, cache, {"mtp": layer_taps} if taps else {})


def make_context(
    model: GlmModel,
    batch: TokenBatch,
    cache: LatentCache | None,
    *,
    taps: bool = False,
    gathered: bool | None = None,
) -> Context:
    """Rotation angles, causal mask and form of attention for one forward."""
    cfg = model.cfg
    causal_GRS = causal_view(batch, None if cache is None else cache.capacity).causal_GRS
    if gathered is None:
        gathered = causal_GRS.shape[-1] > MASKED_UP_TO * cfg.index_topk
    angles = rope_angles(batch.positions_T, cfg.qk_rope_head_dim, cfg.rope_theta)
    return Context(batch, angles, causal_GRS, gathered, taps)


def token_logprobs(
    model: GlmModel, hidden_TD: Float[Array, "T D"], targets_T: Int[Array, "T"]
) -> Float[Array, "T"]:
    """Log p(target) of each row, f32."""
    logits_TV = model.logits(hidden_TD)
    chosen_T1 = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=1)
    return chosen_T1[:, 0] - jax.nn.logsumexp(logits_TV, axis=-1)
