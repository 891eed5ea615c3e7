"""Countdown: reach a target with + - * / from given numbers, each used exactly once.

A problem reads `3,7,12=33:`, and `3*7+12` with `<eos>` after it is an answer. Everything is a
function of seed, split and index.
"""

import dataclasses
import hashlib
from typing import NamedTuple

import numpy as np

from glm_jax.errors import GlmError
from glm_jax.tokenizer import BOS, EOS, Tokenizer, character_tokenizer
from rl.envs.arithmetic import MOST_NUMBERS, OPERATORS, evaluate, solve
from rl.envs.environment import Answer, Demonstration, Split

CHARACTERS = "0123456789+-*/()=,: "
"""Of the tokenizer, ids 3 and on."""

_TOKENIZER = character_tokenizer(CHARACTERS)

ONE_IN = 8
"""One in so many of all possible problems can only be met in evaluation."""

MOST_DRAWS = 10_000
"""Draws of one problem before its settings are called impossible."""


class Problem(NamedTuple):
    """Numbers, and what is to be made of them."""

    numbers: tuple[int, ...]
    target: int

    @property
    def text(self) -> str:
        """As the model sees it."""
        return f"{','.join(map(str, self.numbers))}={self.target}:"

    @property
    def split(self) -> Split:
        """Of this problem, whatever the order of its numbers: the splits cannot overlap."""
        key = f"{sorted(self.numbers)} {self.target}".encode()
        return "eval" if hashlib.sha256(key).digest()[0] % ONE_IN == 0 else "train"


class Check(NamedTuple):
    """What is right about an answer, each implied by the next."""

    well_formed: bool
    """It is an expression, and nothing else."""
    right_numbers: bool
    """It uses the given numbers, each exactly once."""
    correct: bool
    """It reaches the target, exactly."""


def check_answer(problem: Problem, text: str) -> Check:
    """Checks an answer without its end token, in exact rational arithmetic."""
    found = evaluate(text)
    if found is None:
        return Check(False, False, False)
    right = sorted(found.numbers) == sorted(problem.numbers)
    return Check(True, right, right and found.value == problem.target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Countdown:
    """The environment; see the module.

    Raises:
        GlmError: settings under which no problem exists, or that cannot be searched.
    """

    seed: int = 0
    """Of the training problems; those of evaluation are the same under every seed."""
    numbers: int = 3
    """Numbers of a problem."""
    largest: int = 9
    """Numbers are 1 to this."""
    largest_target: int = 30
    """Targets are 1 to this."""
    operators: str = OPERATORS
    """With which problems are made; answers may use all four."""
    partial: float = 0.1
    """Reward of an answer that uses the numbers rightly and misses the target; 1 is correct."""

    def __post_init__(self):
        if not 2 <= self.numbers <= MOST_NUMBERS:
            raise GlmError(f"numbers: {self.numbers}; must be 2 to {MOST_NUMBERS}")
        for name in ("largest", "largest_target"):
            if (value := getattr(self, name)) < 1:
                raise GlmError(f"{name}: {value}; must be at least 1")
        signs = set(self.operators)
        if not signs or signs - set(OPERATORS) or len(signs) < len(self.operators):
            raise GlmError(f"operators: {self.operators!r}; give some of {OPERATORS}, each once")
        if not 0 <= self.partial < 1:
            raise GlmError(f"partial: {self.partial}; must be at least 0 and below 1")
        self.problem("train", 0)
        self.problem("eval", 0)

    @property
    def tokenizer(self) -> Tokenizer:
        """One id a character."""
        return _TOKENIZER

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end of an answer."""
        return (self.tokenizer.id_of(EOS),)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest problem, with the one that begins it."""
        number, target = len(str(self.largest)), len(str(self.largest_target))
        return 1 + self.numbers * (number + 1) + target + 1

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest demonstration: numbers, operators, parentheses and the end."""
        digits = self.numbers * len(str(self.largest))
        return digits + (self.numbers - 1) + 2 * max(0, self.numbers - 2) + 1

    def problem(self, split: Split, index: int) -> Problem:
        """Problem `index` of a split; it has a solution.

        Raises:
            GlmError: none was found under these settings.
        """
        key = (0, index) if split == "eval" else (1, self.seed, index)
        rng = np.random.default_rng(key)
        for _ in range(MOST_DRAWS):
            problem = self._draw(rng)
            if problem is not None and problem.split == split:
                return problem
        raise GlmError(
            f"largest_target: no {split} problem of {self.numbers} numbers up to {self.largest} "
            f"with {self.operators} has a target of 1 to {self.largest_target}; raise it or largest"
        )

    def solution(self, problem: Problem) -> str:
        """The shortest answer."""
        found = solve(problem.numbers, problem.target, self.operators)
        assert found is not None, "problems are made from an expression"
        return found

    def episode(self, split: Split, index: int) -> "CountdownEpisode":
        """One answer to one problem."""
        return CountdownEpisode(self, self.problem(split, index))

    def demonstration(self, index: int) -> Demonstration:
        """A training problem and its shortest answer."""
        problem = self.problem("train", index)
        answer = self.tokenizer.encode(self.solution(problem))
        return Demonstration(self.prompt(problem), [*answer, *self.stop_ids])

    def prompt(self, problem: Problem) -> list[int]:
        """Token ids of a problem."""
        return [self.tokenizer.id_of(BOS), *self.tokenizer.encode(problem.text)]

    def _draw(self, rng: np.random.Generator) -> Problem | None:
        """Random numbers, joined two by two in random order, if that makes a target."""
        numbers = tuple(map(int, rng.integers(1, self.largest + 1, self.numbers)))
        terms = [str(number) for number in numbers]
        while len(terms) > 1:
            a, b = (terms.pop(int(rng.integers(len(terms)))) for _ in range(2))
            terms.append(f"({a}{self.operators[int(rng.integers(len(self.operators)))]}{b})")
        found = evaluate(terms[0])
        if found is None or found.value.denominator != 1:
            return None
        target = int(found.value)
        return Problem(numbers, target) if 1 <= target <= self.largest_target else None


@dataclasses.dataclass(frozen=True)
class CountdownEpisode:
    """One answer, then it is over."""

    environment: Countdown
    problem: Problem

    @property
    def prompt(self) -> list[int]:
        """The problem's token ids."""
        return self.environment.prompt(self.problem)

    def step(self, action: np.ndarray) -> Answer:
        """Rewards an answer; one that does not end with `<eos>` is cut, and wrong."""
        ended = len(action) > 0 and int(action[-1]) in self.environment.stop_ids
        # Special tokens are shown, so that none hides within an answer.
        text = (
            self.environment.tokenizer.decode(action[:-1].tolist(), special=True) if ended else ""
        )
        found = check_answer(self.problem, text)
        reward = self.environment.partial if found.right_numbers else 0.0
        metrics = {name: float(value) for name, value in found._asdict().items()}
        return Answer(reward=1.0 if found.correct else reward, metrics=metrics)
