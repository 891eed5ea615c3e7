"""The model: Flax NNX modules, used functionally."""

from glm_jax.model.model import GlmModel

__all__ = ["GlmModel"]
