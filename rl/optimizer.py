"""AdamW on f32 masters, with clipping; one jitted update."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from glm_jax.errors import GlmError

Arrays = dict[str, Array]
F32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class AdamParams:
    """Settings of one optimiser step; names and defaults of the Tinker API."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Decoupled; of every trained array."""
    grad_clip_norm: float = 0.0
    """Largest global norm of the gradient; 0 does not clip."""

    def __post_init__(self):
        for name, value in vars(self).items():
            # Schedules give scalars of JAX or NumPy; a number in quotes is a mistake elsewhere.
            if isinstance(value, str | bool):
                raise GlmError(f"{name}: {value!r}; must be a number")
            if not 0 <= float(value) <= F32_MAX:
                raise GlmError(f"{name}: {value}; must be finite in f32 and not negative")
            object.__setattr__(self, name, float(value))
        if self.beta1 >= 1 or self.beta2 >= 1 or self.eps == 0:
            raise GlmError(
                f"beta1 {self.beta1}, beta2 {self.beta2}: below 1; eps {self.eps}: above 0"
            )


class OptState(NamedTuple):
    """Masters and moments."""

    masters: Arrays
    """f32, by parameter path."""
    adam: Any
    """optax's state."""


class Update(NamedTuple):
    """Result of an update."""

    state: OptState
    norm: Array
    """Of the gradient before clipping."""
    unsound: Arrays
    """By path: whether the gradient's squares have no finite sum."""
    ruined: Arrays
    """By path: whether the new master or a moment holds a value that is not finite."""

    def check(self) -> None:
        """Raises `GlmError`, naming an array, unless the state can be taken."""
        unsound, ruined = (_raised(flags) for flags in (self.unsound, self.ruined))
        if unsound:
            raise GlmError(
                f"gradient of {unsound[0]} ({len(unsound)} arrays) is not finite, or too large to "
                "be squared; the step was not taken"
            )
        if not math.isfinite(norm := float(self.norm)):
            raise GlmError(f"norm of the gradient is {norm}; the step was not taken")
        if ruined:
            raise GlmError(
                f"the step would leave {ruined[0]} ({len(ruined)} arrays) not finite; it was not "
                "taken: lower learning_rate"
            )


def initial_state(masters: Arrays) -> OptState:
    """Moments of zero."""
    return OptState(masters, optax.scale_by_adam().init(masters))


def update(state: OptState, gradients: Arrays, params: AdamParams) -> Update:
    """One AdamW step; the caller calls `check` before it takes the result."""
    numbers = (params.learning_rate, params.weight_decay, params.grad_clip_norm or math.inf)
    constants = (params.beta1, params.beta2, params.eps)
    return _update(constants, state, gradients, *map(jnp.float32, numbers))


def _apply(constants, state: OptState, gradients: Arrays, rate, decay, clip) -> Update:
    beta1, beta2, eps = constants
    squares = {path: jnp.sum(gradients[path] ** 2) for path in sorted(gradients)}
    total = functools.reduce(jnp.add, squares.values())  # in this order
    norm = jnp.sqrt(total)
    scale = jnp.minimum(1.0, clip / jnp.maximum(norm, jnp.float32(1e-30)))
    clipped = {path: gradient * scale for path, gradient in gradients.items()}
    steps: Any
    adam: Any
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        steps, adam = optax.scale_by_adam(beta1, beta2, eps).update(clipped, state.adam)
    masters = {
        path: master - rate * (steps[path] + decay * master)
        for path, master in state.masters.items()
    }
    unsound = {path: ~jnp.isfinite(square) for path, square in squares.items()}
    ruined = {
        path: ~jnp.all(jnp.isfinite(masters[path] + adam.mu[path] + adam.nu[path]))
        for path in masters
    }
    return Update(OptState(masters, adam), norm, unsound, ruined)


def _raised(flags: Arrays) -> list[str]:
    return [path for path, flag in sorted(jax.device_get(flags).items()) if flag]


_update = jax.jit(_apply, static_argnums=0)
