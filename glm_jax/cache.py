"""What a token reads of the past: one latent row a layer, one index key a full layer, in pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from glm_jax.batch import TokenBatch
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache:
    """Keys of every slot in pages. The MTP layer's rows come last on both layer axes."""

    latent_LPsC: Float[Array, "L P s C"]
    """Normalised latent and rotated rope key, by layer, page and offset."""
    index_MPsJ: Float[Array, "M P s J"]
    """Rotated index keys of the full layers."""
    table_Up: Int[Array, "U p"]
    """Page of each slot's positions 0 to s-1, s to 2s-1, ...; -1 where the slot has none."""
    cos_SW: Float[Array, "S W"]
    sin_SW: Float[Array, "S W"]
    """Rotation of each position, made once on the host, so that no program rounds it anew."""
    contract: NumericsContract = dataclasses.field(metadata={"static": True})
    """The numerics that its rows are written under, and that reads them."""

    @classmethod
    def empty(
        cls,
        cfg: GlmConfig,
        n_slots: int,
        capacity: int,
        *,
        contract: NumericsContract | None = None,
        n_pages: int | None = None,
    ) -> "LatentCache":
        """A zeroed cache for `n_slots` sequences of up to `capacity` tokens.

        Args:
            cfg: the model's config.
            n_slots: sequences that can be held at once.
            capacity: tokens a sequence; rounded up to whole pages.
            contract: the numerics it is written under (default: pinned).
            n_pages: size of a shared page pool; the table is then empty (-1) and the caller hands
                out pages. Default: every slot owns its pages, one after the other.

        Raises:
            GlmError: `capacity` is not positive or exceeds `max_position_embeddings`; no slot, no
                page.
        """
        contract = contract or NumericsContract()
        if n_slots < 1 or not 1 <= capacity <= cfg.max_position_embeddings:
            raise GlmError(
                f"cache: {n_slots} slots of {capacity} tokens; need at least one slot and a "
                f"capacity of 1 to max_position_embeddings = {cfg.max_position_embeddings}"
            )
        if n_pages is not None and n_pages < 1:
            raise GlmError(f"cache: {n_pages} pages; need at least one")
        size = contract.key_block
        a_slot = -(-capacity // size)
        if n_pages is None:
            table = np.arange(n_slots * a_slot, dtype=np.int32).reshape(n_slots, a_slot)
        else:
            table = np.full((n_slots, a_slot), -1, np.int32)
        total = n_slots * a_slot if n_pages is None else n_pages
        mtp = cfg.num_nextn_predict_layers
        n_full = cfg.indexer_types.count("full") + mtp
        cos, sin = rope_table(a_slot * size, cfg.qk_rope_head_dim, cfg.rope_theta)
        return cls(
            jnp.zeros((cfg.num_hidden_layers + mtp, total, size, cfg.cache_width), cfg.dtype),
            jnp.zeros((n_full, total, size, cfg.index_head_dim), cfg.dtype),
            jnp.asarray(table),
            jnp.asarray(cos),
            jnp.asarray(sin),
            contract,
        )

    def replace(self, **changes: Any) -> "LatentCache":
        """The cache with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.latent_LPsC.shape[2]

    @property
    def capacity(self) -> int:
        """Tokens a slot can hold."""
        return self.table_Up.shape[1] * self.page_size


def rope_table(n_positions: int, width: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of `position * theta^(-2j/width)`, `[positions, width/2]`, f32.

    The phase is an f32 product, as in the engines that the released weights were tuned with; its
    cosine is taken in f64 and rounded once, which every machine does alike.
    """
    frequency_W = (float(theta) ** (-np.arange(0, width, 2, dtype=np.float64) / width)).astype(
        np.float32
    )
    phase_SW = np.arange(n_positions, dtype=np.float32)[:, None] * frequency_W[None, :]
    phase_SW = phase_SW.astype(np.float64)
    return np.cos(phase_SW).astype(np.float32), np.sin(phase_SW).astype(np.float32)


def page_rows(cache: LatentCache, batch: TokenBatch) -> Int[Array, "T"]:
    """Row of each token in a layer's pages seen as one list; past the end for padding."""
    size = cache.page_size
    page_T = cache.table_Up[batch.slots_T, batch.positions_T // size]
    row_T = page_T * size + batch.positions_T % size
    n_rows = cache.latent_LPsC.shape[1] * size
    return jnp.where(batch.valid_T & (page_T >= 0), row_T, n_rows)


def write_rows(
    store_LPsX: Array, layer: int | Int[Array, ""], rows_T: Int[Array, "T"], new_TX: Array
) -> Array:
    """Stores the tokens' rows; a row past the end (padding) is dropped."""
    n_layers, n_pages, size, width = store_LPsX.shape
    flat = store_LPsX.reshape(n_layers, n_pages * size, width)
    # Two tokens never share a place, so the scatter has no order to depend on.
    flat = flat.at[layer, rows_T].set(new_TX.astype(flat.dtype), mode="drop")
    return flat.reshape(store_LPsX.shape)


def slot_keys(
    store_LPsX: Array, layer: int | Int[Array, ""], table_Gp: Int[Array, "G p"]
) -> Float[Array, "G S X"]:
    """All of a layer's keys of some slots, by position. What has no page is undefined."""
    keys_GpsX = store_LPsX[layer, table_Gp]
    return keys_GpsX.reshape(table_Gp.shape[0], -1, store_LPsX.shape[-1])


def causal_mask(batch: TokenBatch, capacity: int | None) -> Bool[Array, "G R S"]:
    """True where key s is in the row's sequence and not after it.

    Keys are the batch's own rows (`capacity` None) or a cache's positions.
    """
    position_GR = batch.positions_T.reshape(batch.n_groups, batch.rows)
    valid_GR = batch.valid_T.reshape(batch.n_groups, batch.rows)
    if capacity is None:
        key_GS, known_GS = position_GR, valid_GR
    else:
        key_GS = jnp.arange(capacity, dtype=position_GR.dtype)[None, :]
        known_GS = jnp.ones((1, capacity), bool)
    causal_GRS = (key_GS[:, None, :] <= position_GR[:, :, None]) & known_GS[:, None, :]
    return causal_GRS & valid_GR[:, :, None]
