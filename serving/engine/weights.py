"""Weights that requests run on, and the refusal of those that the compiled programs do not fit."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.params import leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """One set of weights. Samples hold it; it goes when the last of them has."""

    arrays: list[Array]
    """In the order of the model's structure."""
    version: int
    root: bytes
    """First link of the keys of pages that it computes."""


class Layout:
    """Config, structure, shapes, dtypes and devices of a model's weights."""

    def __init__(self, model: GlmModel):
        self.cfg = model.cfg
        self.structure: Any = jax.tree.structure(model)
        self._leaves = _described(model)
        self._shardings = [x.sharding for x in jax.tree.leaves(model)]

    def arrays(self, model: GlmModel) -> list[Array]:
        """The arrays of a model of the same layout, in the order of its structure.

        By reference where they lie on the engine's devices as its own do; others are copied there
        from device to device.

        Raises:
            GlmError: names the first config field or leaf that differs.
        """
        for field in dataclasses.fields(self.cfg):
            ours, theirs = getattr(self.cfg, field.name), getattr(model.cfg, field.name)
            if ours != theirs:
                raise GlmError(
                    f"weights: {field.name} is {theirs!r:.60}, the engine's is {ours!r:.60}; give "
                    "a model of the same config, or make another engine"
                )
        described = _described(model)
        for path in sorted(described.keys() | self._leaves.keys()):
            ours, theirs = self._leaves.get(path, "absent"), described.get(path, "absent")
            if ours != theirs:
                raise GlmError(
                    f"weights: {path} is {theirs}, the engine's is {ours}; give a model of the "
                    "same layout, or make another engine"
                )
        arrays, structure = jax.tree.flatten(model)
        if structure != self.structure:
            raise GlmError(
                "weights: the model's leaves are the engine's, but not its structure; build it "
                "with GlmModel, without wrappers"
            )
        pairs = zip(arrays, self._shardings, strict=True)
        return [x if x.sharding == own else jax.device_put(x, own) for x, own in pairs]


def _described(model: GlmModel) -> dict[str, str]:
    return {path: f"{x.dtype}{list(x.shape)}" for path, x in leaves(model)}
