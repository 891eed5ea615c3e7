"""Rollouts: seeds by problem and sample, turns, and environments that fail."""

import numpy as np
import pytest

from glm_jax.errors import GlmError
from rl.rollout import roll_out, seed_of
from serving.engine import Completion, SamplingParams
from tests.rl.fakes import EOS, DigitSum, FakeEngine

PARAMS = SamplingParams(max_tokens=4, stop_ids=(EOS,), temperature=0.7)


def roll(environment=None, problems=range(6), engine=None, group_size=3, **changes):
    options = {"group_size": group_size, "seed": (5, 1, 2), **changes}
    return roll_out(
        engine or FakeEngine(), environment or DigitSum(), "train", problems, PARAMS, **options
    )


def as_data(group):
    return [(t.tokens.tolist(), t.logprobs[t.sampled].tolist(), t.reward) for t in group[1]]


def test_a_group_does_not_depend_on_the_other_problems():
    whole, alone = roll(), roll(problems=[4])
    assert [group.problem for group in whole.groups] == list(range(6))
    assert as_data(whole.groups[4]) == as_data(alone.groups[0])


def test_samples_of_a_group_share_a_seed_and_differ_by_number():
    engine = FakeEngine()
    roll(engine=engine)
    ((_, params),) = engine.calls
    assert [p.first_sample for p in params] == [0, 1, 2] * 6
    assert {p.seed for p in params[3:6]} == {seed_of(5, 1, 2, 1)}
    assert len({p.seed for p in params}) == 6
    assert all((p.n, p.temperature, p.max_tokens) == (1, 0.7, 4) for p in params)


def test_seeds_depend_on_every_number_and_fit_the_sampler():
    keys = [(0, 1, 2, 3), (1, 1, 2, 3), (0, 2, 2, 3), (0, 1, 3, 3), (0, 1, 2, 4), (0, 1, 2)]
    assert len({seed_of(*key) for key in keys}) == len(keys)
    assert seed_of(0, 1, 2, 3) == seed_of(0, 1, 2, 3) < 2**32


def test_prompt_and_sampled_tokens_are_told_apart():
    trajectory = roll().groups[5].trajectories[0]
    assert trajectory.sampled.tolist() == [False] + [True] * (len(trajectory.tokens) - 1)
    assert np.isnan(trajectory.logprobs[:1]).all() and np.isfinite(trajectory.logprobs[1:]).all()
    assert trajectory.kept is None and trajectory.versions == {0}


def test_turns_follow_each_other_with_observations_between_them_that_were_not_sampled():
    engine = FakeEngine()
    trajectory = roll(DigitSum(n_turns=3), [7], engine, group_size=2).groups[0].trajectories[1]
    assert trajectory.n_turns == 3 and len(engine.calls) == 3
    second = engine.calls[1][0][1]
    assert second == trajectory.tokens[: len(second)].tolist() and second[-2:] == [4, 5]
    marks = "".join("x" if sampled else "." for sampled in trajectory.sampled)
    assert len(marks.split("..")) == 3 and marks.startswith(".x")
    assert (np.isfinite(trajectory.logprobs) == trajectory.sampled).all()
    by_turn = [sum(map(int, part)) for part in actions(trajectory)]
    assert trajectory.reward == pytest.approx(sum(total % 10 / 10 for total in by_turn))


def actions(trajectory):
    edges = np.flatnonzero(np.diff(trajectory.sampled.astype(int))) + 1
    return np.split(trajectory.tokens, edges)[1::2]


def test_an_episode_ends_where_another_action_would_not_fit():
    engine = FakeEngine()
    trajectory = roll(DigitSum(n_turns=99), [7], engine, group_size=1).groups[0].trajectories[0]
    assert trajectory.cut and 1 < trajectory.n_turns < 99
    assert engine.capacity - 4 - 2 < len(trajectory.tokens) <= engine.capacity
    assert trajectory.sampled[-1]  # what it would have seen next is left out


def test_an_observation_that_does_not_fit_ends_the_episode():
    engine = FakeEngine()
    rollout = roll(DigitSum(failing={2: "long"}, n_turns=2), engine=engine)
    assert not rollout.dropped
    turns = {g.problem: {(t.n_turns, t.cut) for t in g.trajectories} for g in rollout.groups}
    assert turns.pop(2) == {(1, True)}
    assert all(n == 2 for problem in turns.values() for n, _ in problem)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("raises", "RuntimeError: the checker broke"),
        ("episode", "RuntimeError: no such problem"),
        ("nan", "ValueError: reward is nan; need numbers below 1e+30"),
        ("inf", "ValueError: reward is inf; need numbers below 1e+30"),
        ("huge", "ValueError: reward is 1e+308; need numbers below 1e+30"),
        ("metric", "ValueError: odd is nan; need numbers below 1e+30"),
        ("prompt", "ValueError: token ids must be 0 to 12"),
        ("observation", "ValueError: token ids must be 0 to 12"),
    ],
)
def test_a_failing_problem_is_dropped_with_its_reason_and_changes_no_other(failure, reason):
    environment = DigitSum(failing={2: failure}, n_turns=2)
    rollout = roll(environment)
    assert rollout.dropped == {2: reason}
    assert [group.problem for group in rollout.groups] == [0, 1, 3, 4, 5]
    sound = roll(DigitSum(n_turns=2))
    assert [as_data(g) for g in rollout.groups] == [
        as_data(g) for g in sound.groups if g.problem != 2
    ]


def test_half_may_fail_and_more_than_half_stop_the_run_with_the_first_reason():
    assert len(roll(DigitSum(failing=dict.fromkeys((1, 3, 5), "nan"))).dropped) == 3
    failing = {1: "raises", **dict.fromkeys((3, 4, 5), "nan")}
    with pytest.raises(GlmError, match=r"4 of 6 problems failed.*problem 1: .*the checker broke"):
        roll(DigitSum(failing=failing))


def test_an_interrupt_is_no_failure_of_the_environment():
    class Interrupted(DigitSum):
        def episode(self, split, index):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roll(Interrupted())


def test_kept_sets_stand_at_sampled_tokens_and_all_ids_elsewhere():
    class Filtering(FakeEngine):
        def _sample(self, prompt, params):
            found = super()._sample(prompt, params)
            kept = np.arange(len(found.token_ids), dtype=np.uint32)[:, None]
            return Completion(**{**vars(found), "kept": kept})

    trajectory = roll(engine=Filtering()).groups[0].trajectories[0]
    n = len(trajectory.tokens) - 1
    assert trajectory.kept[:, 0].tolist() == [0xFFFFFFFF, *range(n)]
