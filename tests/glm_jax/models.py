"""A model small enough to trace in seconds that still has every kind of layer, for these tests."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.config import GlmConfig
from glm_jax.forward import forward
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.presets import preset

SMALL = preset("tiny").with_overrides(
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=5,
    mlp_layer_types=("dense", *["sparse"] * 4),
    indexer_types=("full", "full", "shared", "full", "shared"),
    first_k_dense_replace=1,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    initializer_range=0.2,  # 0.02 leaves so narrow a model nearly linear
)
"""Selection bites from the fifth token on; layers 1 and 2 are scanned with 3 and 4."""


THREE = preset("tiny").with_overrides(
    num_hidden_layers=3,
    first_k_dense_replace=1,
    mlp_layer_types=("dense", "sparse", "sparse"),
    indexer_types=("full", "shared", "shared"),
    num_nextn_predict_layers=0,
)
"""A scanned pair of sparse layers behind a dense one: all kinds of block, few bodies to compile."""

PINNED = NumericsContract(key_block=4)
"""Pages of four tokens, so that short sequences cross them."""

NATIVE = NumericsContract(mode="native", key_block=4)


@functools.cache
def model_of(cfg: GlmConfig, seed: int = 0) -> GlmModel:
    """The model of a config; nobody may change it."""
    return GlmModel.init(cfg, seed)


class Run(NamedTuple):
    """What a forward gives."""

    hidden_TD: jax.Array
    logits_TV: jax.Array
    cache: object
    taps: dict


@functools.partial(jax.jit, static_argnames="gathered")
def run(model, batch, cache=None, gathered=False) -> Run:
    """The forward of these tests, with everything it can give."""
    out = forward(model, batch, cache, taps=True, gathered=gathered)
    return Run(out.hidden_TD, model.logits(out.hidden_TD), out.cache, out.taps)


def slot_rows(cache: LatentCache, name: str) -> np.ndarray:
    """`[L, U, S, X]`: the rows of a store (`latent_LPsC` or `index_MPsJ`) by slot and position."""
    pages_LUpsX = np.asarray(getattr(cache, name))[:, np.asarray(cache.table_Up)]
    n_layers, n_slots = pages_LUpsX.shape[:2]
    return pages_LUpsX.reshape(n_layers, n_slots, cache.capacity, -1)


def ids(n_sequences: int, n_tokens: int, seed: int = 0, cfg: GlmConfig = SMALL) -> np.ndarray:
    """Token ids, no two the same in a sequence."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(cfg.vocab_size)[:n_tokens] for _ in range(n_sequences)]
    return np.stack(rows)


def batch_of(sequences, **options) -> TokenBatch:
    """The batch of these sequences under the small config."""
    return TokenBatch.from_sequences(SMALL, sequences, **options)
