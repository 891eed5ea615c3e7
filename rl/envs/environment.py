"""What a researcher implements to train on another task."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from glm_jax.tokenizer import Tokenizer

Split = Literal["train", "eval"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What an environment says to an action."""

    reward: float = 0.0
    """Added to the episode's return."""
    done: bool = True
    observation: Sequence[int] = ()
    """Token ids that follow the action, before the next one; they are not trained on."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Means of these are logged as `env/NAME`; `correct` (0 or 1) also as `reward/correct`."""


class Demonstration(NamedTuple):
    """A problem and a good answer to it, for the supervised start."""

    prompt: Sequence[int]
    answer: Sequence[int]
    """Ids that the model should sample, the stop id included."""


class Episode(Protocol):
    """One sample's way through a problem. It may keep state; samples of a group share none."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids that the first action follows."""
        ...

    def step(self, action: np.ndarray) -> Answer:
        """Takes what was sampled.

        Args:
            action: token ids `[n]`, int32; the stop id that ended it is included, and absent where
                the action was cut at the most tokens allowed.
        """
        ...


class Environment(Protocol):
    """A set of problems. Everything must be a function of split and index: runs are resumed."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its ids are the model's vocabulary."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end an action."""
        ...

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest first prompt."""
        ...

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest demonstrated answer."""
        ...

    def episode(self, split: Split, index: int) -> Episode:
        """A new episode of problem `index` of a split. No problem is in both splits."""
        ...

    def demonstration(self, index: int) -> Demonstration:
        """A worked problem of the training split."""
        ...
