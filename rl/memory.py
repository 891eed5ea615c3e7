"""Whether a run fits this machine: a lower bound of its bytes, before anything is allocated."""

import os

import jax
import numpy as np

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves, size
from glm_jax.sizes import cache_bytes, cache_layout
from glm_jax.training.accumulate import bits
from rl.recipe import Recipe


def require_memory(recipe: Recipe, model: GlmModel, contract: NumericsContract) -> None:
    """Refuses a run that cannot fit.

    Args:
        recipe: sizes of engine and trainer.
        model: the model with shapes in place of arrays.
        contract: cuts gradients in chunks.

    Raises:
        GlmError: names what needs most, and the keys that set it.
    """
    needs, have = needed_bytes(recipe, model, contract), available_bytes()
    total = sum(n for n, _ in needs.values())
    if total <= have:
        return
    name, (most, keys) = max(needs.items(), key=lambda item: item[1][0])
    raise GlmError(
        f"recipe: needs at least {total / 2**30:,.1f} GiB, and {have / 2**30:,.1f} GiB are there; "
        f"{name} take {most / 2**30:,.1f} GiB: lower {keys}"
    )


def needed_bytes(
    recipe: Recipe, model: GlmModel, contract: NumericsContract
) -> dict[str, tuple[int, str]]:
    """Bytes of what is held all the time, with the keys that they follow from."""
    cfg, engine, trainer = model.cfg, recipe.engine, recipe.trainer
    n_params = sum(size(variable) for _, variable in leaves(model))
    n_data = max(recipe.sft.batch_size, recipe.rl.problems * recipe.rl.group_size)
    n_chunks = -(-engine.capacity // contract.token_leaf)
    # Weights; f32 masters and two moments; the last leaf of the gradients' tree and its levels.
    n_sums = 1 + max(1, bits(n_chunks) + bits(n_data * n_chunks))
    an_element = np.dtype(cfg.dtype).itemsize + 12 + 4 * n_sums
    a_token = cache_bytes(cfg, cache_layout(cfg))
    # Of each layer the backward reads at least its inputs, queries and the latents it attended.
    n_saved = cfg.num_hidden_layers * (
        2 * cfg.hidden_size
        + cfg.num_attention_heads * (cfg.qk_head_dim + 2 * cfg.kv_lora_rank)
        + cfg.num_experts_per_tok * cfg.moe_intermediate_size
    )
    a_row = n_saved * np.dtype(cfg.dtype).itemsize
    return {
        "weights, moments and gradients": (n_params * an_element, "sizes of the model"),
        "the engine's pages": (
            engine.n_slots * engine.capacity * a_token,
            "engine.n_slots or engine.capacity",
        ),
        "rows of the trainer": (trainer.rows_per_batch * a_row, "trainer.rows_per_batch"),
    }


def available_bytes() -> int:
    """Memory of the default device; of the machine, where the device has none of its own."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
