"""Models changed so that what is rare happens everywhere: ties, full and empty experts."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.params import leaves

VARIANTS = ("plain", "ties", "one_expert")
FAR = 100.0
"""A bias that decides alone: scores lie between 0 and 1."""


def variant(model: GlmModel, name: str) -> GlmModel:
    """The model with its routers and indexers changed.

    `plain`: as given. `ties`: routed experts come in pairs with equal router columns and biases,
    and in the first repeat of each pattern of layers the indexer's head weights are zero, so that
    all keys tie. `one_expert`: every token takes expert 0, and the last quarter of the experts gets
    none.

    Raises:
        GlmError: an unknown name.
    """
    check_variant(name)
    if name == "plain":
        return model
    graphdef, state = nnx.split(nnx.clone(model))
    for path, variable in leaves(state):
        leaf, value = path.rpartition(".")[2], np.array(variable.get_value())
        if name == "ties":
            value = _tie(leaf, value)
        elif leaf == "router_bias":
            n_free = value.shape[-1] - model.cfg.num_experts_per_tok
            n_empty = min(value.shape[-1] // 4, n_free)
            value[..., 0] = FAR
            value[..., value.shape[-1] - n_empty :] = -FAR
        variable.set_value(jnp.asarray(value))
    return nnx.merge(graphdef, state)


def check_variant(name: str) -> None:
    """Raises `GlmError` for an unknown variant."""
    if name not in VARIANTS:
        raise GlmError(f"variant {name!r}: use one of {', '.join(VARIANTS)}")


def _tie(leaf: str, value: np.ndarray) -> np.ndarray:
    if leaf in ("router", "router_bias"):
        n_pairs = value.shape[-1] // 2
        value[..., 1 : 2 * n_pairs : 2] = value[..., 0 : 2 * n_pairs : 2]
    elif leaf == "head_weight":
        if value.ndim == 3:
            value[0] = 0
        else:
            value[:] = 0
    return value
