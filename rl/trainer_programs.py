"""The trainer's jitted programs, and the arrays of the model they run with."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.training import backward as training
from glm_jax.training.backward import GradientState, Saved
from glm_jax.training.pack import TrainBatch


class Programs:
    """Forward, backward and the sums between; compiled once for all models of one structure."""

    def __init__(self, model: GlmModel, contract: NumericsContract, room: tuple[int, int]):
        """`room`: bits of the chunks of a sequence, and of the sequences of a step."""
        self._arrays, self._structure = jax.tree.flatten(model)
        self._contract, self._room = contract, room

    def set_model(self, model: GlmModel) -> None:
        """Takes other values of the same structure."""
        self._arrays = jax.tree.leaves(model)

    def forward(self, train: TrainBatch) -> tuple[Float[Array, "T"], Saved]:
        """Log-probabilities of the targets, and what `backward` needs."""
        return _forward(self._structure, self._contract, self._arrays, train)

    def backward(
        self,
        train: TrainBatch,
        saved: Saved,
        d_logprob_T: Float[Array, "T"],
        total: GradientState,
    ) -> GradientState:
        """Adds a microbatch's gradients to `total`, whose memory is taken."""
        return _backward(
            self._structure, self._contract, self._arrays, train, saved, d_logprob_T, total
        )

    def initial(self) -> GradientState:
        """No gradient yet."""
        return _initial(self._structure, self._room, self._arrays)

    def gradients(self, total: GradientState) -> dict[str, Array]:
        """By parameter path, f32."""
        return _gradients(self._structure, self._arrays, total)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(structure: Any, contract: NumericsContract, arrays: list[Array], train: TrainBatch):
    return training.train_forward(jax.tree.unflatten(structure, arrays), train, contract)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=6)
def _backward(structure, contract, arrays, train, saved, d_logprob_T, state):
    model = jax.tree.unflatten(structure, arrays)
    return training.backward(model, train, saved, d_logprob_T, state, contract)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _initial(structure: Any, room: tuple[int, int], arrays: list[Array]):
    return training.initial(jax.tree.unflatten(structure, arrays), *room)


@functools.partial(jax.jit, static_argnums=0)
def _gradients(structure: Any, arrays: list[Array], state: GradientState):
    return training.gradients(jax.tree.unflatten(structure, arrays), state)
