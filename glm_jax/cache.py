"""What a decode step reads of the past: one latent row a layer, one index key a full layer."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.batch import TokenBatch
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError


class LatentCache(NamedTuple):
    """Keys of every slot, by position. The MTP layer's rows come last on both layer axes."""

    latent_LUSC: Float[Array, "L U S C"]
    """Normalised latent and rotated rope key of each layer, slot and position."""
    index_LUSJ: Float[Array, "M U S J"]
    """Rotated index keys of each full layer."""

    @classmethod
    def empty(cls, cfg: GlmConfig, n_slots: int, capacity: int) -> "LatentCache":
        """A zeroed cache for `n_slots` sequences of up to `capacity` tokens.

        Raises:
            GlmError: `capacity` is not positive or exceeds `max_position_embeddings`.
        """
        if n_slots < 1 or not 1 <= capacity <= cfg.max_position_embeddings:
            raise GlmError(
                f"cache: {n_slots} slots of {capacity} tokens; need at least one slot and a "
                f"capacity of 1 to max_position_embeddings = {cfg.max_position_embeddings}"
            )
        mtp = cfg.num_nextn_predict_layers
        n_full = cfg.indexer_types.count("full") + mtp
        return cls(
            jnp.zeros((cfg.num_hidden_layers + mtp, n_slots, capacity, cfg.cache_width), cfg.dtype),
            jnp.zeros((n_full, n_slots, capacity, cfg.index_head_dim), cfg.dtype),
        )

    @property
    def capacity(self) -> int:
        """Tokens a slot can hold."""
        return self.latent_LUSC.shape[2]


def write_rows(
    store_LUSX: Array, layer: int | Int[Array, ""], batch: TokenBatch, rows_TX: Array
) -> Array:
    """Stores the tokens' rows at their slots and positions; padding is dropped."""
    slot_T = jnp.repeat(batch.slots_G, batch.rows, total_repeat_length=batch.n_tokens)
    # An index past the end with mode "drop" is how a scatter skips a row.
    position_T = jnp.where(batch.valid_T, batch.positions_T, store_LUSX.shape[2])
    return store_LUSX.at[layer, slot_T, position_T].set(rows_TX, mode="drop")


class KeyView(NamedTuple):
    """Which keys each row may attend, for the whole forward."""

    causal_GRS: Bool[Array, "G R S"]
    """True where key s belongs to the row's sequence and is not after it."""


def causal_view(batch: TokenBatch, capacity: int | None) -> KeyView:
    """The causal mask over the batch's own rows (`capacity` None) or over a cache's positions."""
    position_GR = batch.positions_T.reshape(batch.n_groups, batch.rows)
    valid_GR = batch.valid_T.reshape(batch.n_groups, batch.rows)
    if capacity is None:
        key_GS, known_GS = position_GR, valid_GR
    else:
        key_GS = jnp.arange(capacity, dtype=position_GR.dtype)[None, :]
        known_GS = jnp.ones((1, capacity), bool)
    causal_GRS = (key_GS[:, None, :] <= position_GR[:, :, None]) & known_GS[:, None, :]
    return KeyView(causal_GRS & valid_GR[:, :, None])
