"""Rollouts: every problem of a step is answered by a group of samples, over one or more turns."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from glm_jax.errors import GlmError
from rl.envs import Environment, Episode, Split
from serving.engine import Completion, SamplingParams

LARGEST = 1e30
"""Rewards and metrics are below it, so that no sum or square of them overflows."""


class Generator(Protocol):
    """What rollouts need of an engine."""

    @property
    def capacity(self) -> int:
        """Tokens a sequence can have."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """Samples every prompt: `[prompt][sample]`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sample's way through a problem, N tokens in all."""

    tokens: np.ndarray
    """Prompt, actions and observations `[N]`, int32."""
    sampled: np.ndarray
    """Which of them were sampled `[N]`."""
    logprobs: np.ndarray
    """Of the distribution that was sampled, NaN where a token was not `[N]`, f32."""
    kept: np.ndarray | None
    """Ids that could be sampled, as bits `[N, W]`; all where a token was not; None: always all."""
    versions: frozenset[int]
    """Of the weights that sampled it."""
    n_prompt: int
    """Tokens of the first prompt."""
    reward: float
    metrics: dict[str, float]
    """The environment's, of the last turn that gave each."""
    n_turns: int
    cut: bool
    """Whether the last action met a bound on tokens instead of a stop id."""


class Group(NamedTuple):
    """Samples of one problem."""

    problem: int
    trajectories: list[Trajectory]


class Rollout(NamedTuple):
    """What a step has to learn from."""

    groups: list[Group]
    dropped: dict[int, str]
    """Reasons by problem: its environment raised, or gave what is no finite number."""


def seed_of(*key: int) -> int:
    """A sampling seed that is a function of these numbers alone."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0])


def roll_out(
    engine: Generator,
    environment: Environment,
    split: Split,
    problems: Sequence[int],
    params: SamplingParams,
    *,
    group_size: int,
    seed: Sequence[int],
) -> Rollout:
    """Answers problems.

    Args:
        engine: samples the actions.
        environment: gives prompts and rewards.
        split: which problems.
        problems: their indices.
        params: of every action; its seed and sample numbers are replaced.
        group_size: samples a problem.
        seed: with the problem's index, all that randomness depends on.

    Raises:
        GlmError: more than half of the problems were dropped; gives the first reason.
    """
    samples = [
        _Sample(environment, split, problem, number, engine.capacity - params.max_tokens)
        for problem in problems
        for number in range(group_size)
    ]
    while live := _live(samples):
        each = [
            dataclasses.replace(
                params, n=1, first_sample=sample.number, seed=seed_of(*seed, sample.problem)
            )
            for sample in live
        ]
        answers = engine.generate([list(sample.tokens) for sample in live], each)
        for sample, (completion,) in zip(live, answers, strict=True):
            sample.take(completion)
    dropped = {s.problem: s.failure for s in reversed(samples) if s.failure is not None}
    if 2 * len(dropped) > len(problems):
        problem = next(p for p in problems if p in dropped)
        raise GlmError(
            f"environment: {len(dropped)} of {len(problems)} problems failed, more than half; "
            f"problem {problem}: {dropped[problem]}"
        )
    groups = [
        Group(problem, [s.trajectory() for s in samples[i * group_size : (i + 1) * group_size]])
        for i, problem in enumerate(problems)
        if problem not in dropped
    ]
    return Rollout(groups, dropped)


def _live(samples: list["_Sample"]) -> list["_Sample"]:
    """Those that need another action; none of a problem that is lost already."""
    lost = {sample.problem for sample in samples if sample.failure is not None}
    return [sample for sample in samples if sample.live and sample.problem not in lost]


class _Sample:
    """A trajectory in the making. What goes wrong in an environment is kept in `failure`."""

    def __init__(
        self, environment: Environment, split: Split, problem: int, number: int, most_prompt: int
    ):
        self.problem, self.number = problem, number
        self.vocab_size, self.most_prompt = environment.tokenizer.vocab_size, most_prompt
        self.failure: str | None = None
        self.live, self.cut = True, False
        self.tokens: list[int] = []
        self.sampled: list[bool] = []
        self.logprobs: list[float] = []
        self.kept: list[np.ndarray | None] = []
        self.versions: set[int] = set()
        self.reward, self.metrics, self.n_turns, self.n_prompt = 0.0, {}, 0, 0
        self._guard(self._begin, environment, split)

    def take(self, completion: Completion) -> None:
        """Adds an action and asks the environment what it makes of it."""
        ids = completion.token_ids
        self.tokens += map(int, ids)
        self.sampled += [True] * len(ids)
        self.logprobs += map(float, completion.sampling_logprobs)
        self.kept += [None] * len(ids) if completion.kept is None else list(completion.kept)
        self.versions |= set(map(int, completion.weight_versions))
        self.n_turns += 1
        self.cut = completion.finish_reason == "length"
        self._guard(self._answer, ids)

    def trajectory(self) -> Trajectory:
        """What became of it."""
        kept = None
        if words := next((len(row) for row in self.kept if row is not None), 0):
            everything = np.full(words, 0xFFFFFFFF, np.uint32)
            kept = np.stack([everything if row is None else row for row in self.kept])
        return Trajectory(
            tokens=np.asarray(self.tokens, np.int32),
            sampled=np.asarray(self.sampled, bool),
            logprobs=np.asarray(self.logprobs, np.float32),
            kept=kept,
            versions=frozenset(self.versions),
            n_prompt=self.n_prompt,
            reward=self.reward,
            metrics=self.metrics,
            n_turns=self.n_turns,
            cut=self.cut,
        )

    def _guard(self, call: Any, *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # a researcher's code may raise anything
            self.failure, self.live = f"{type(error).__name__}: {error}", False

    def _begin(self, environment: Environment, split: Split) -> None:
        self.episode: Episode = environment.episode(split, self.problem)
        self._given(self.episode.prompt)
        self.n_prompt = len(self.tokens)
        if not 0 < self.n_prompt <= self.most_prompt:
            raise ValueError(f"the prompt has {self.n_prompt} tokens; need 1 to {self.most_prompt}")

    def _answer(self, ids: np.ndarray) -> None:
        answer = self.episode.step(ids)
        numbers = {"reward": answer.reward, **answer.metrics}
        for name, value in numbers.items():
            if not abs(value) < LARGEST:
                raise ValueError(f"{name} is {value}; need numbers below {LARGEST:g}")
        self.reward += float(answer.reward)
        self.metrics |= {name: float(value) for name, value in answer.metrics.items()}
        self.live = not answer.done
        if self.live:
            n_before = len(self.tokens)
            self._given(answer.observation)
            if len(self.tokens) > self.most_prompt:
                # No room for another action; what nobody answers is nothing to learn from.
                self.live, self.cut = False, True
                for column in (self.tokens, self.sampled, self.logprobs, self.kept):
                    del column[n_before:]

    def _given(self, ids: Sequence[int]) -> None:
        """Adds tokens that are not the model's."""
        array = np.asarray(ids)
        if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
            raise ValueError(f"{ids!r:.60} is no list of token ids")
        if array.size and not (array.min() >= 0 and array.max() < self.vocab_size):
            raise ValueError(f"token ids must be 0 to {self.vocab_size - 1}")
        self.tokens += map(int, array)
        self.sampled += [False] * array.size
        self.logprobs += [math.nan] * array.size
        self.kept += [None] * array.size
