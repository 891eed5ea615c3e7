"""Training data of rollouts, and learning rates."""

import numpy as np
import pytest

from glm_jax.errors import GlmError
from rl.batches import counted, demonstration_data, rollout_data, rollout_metrics
from rl.rollout import Group, Rollout, Trajectory
from rl.schedule import learning_rate

OPTIONS = {"advantage": "dr_grpo", "aggregation": "token", "max_tokens": 5, "temperature": 1.0}


def trajectory(reward, sampled, **more):
    """Tokens 10, 11, ...; the first is always the prompt."""
    n = len(sampled)
    marks = np.asarray([mark == "x" for mark in sampled])
    fields = {
        "tokens": np.arange(10, 10 + n, dtype=np.int32),
        "sampled": marks,
        "logprobs": np.where(marks, -0.1 * np.arange(n), np.nan).astype(np.float32),
        "kept": None,
        "versions": frozenset({3}),
        "n_prompt": sampled.index("x"),
        "reward": reward,
        "metrics": {},
        "n_turns": 1,
        "cut": False,
    }
    return Trajectory(**{**fields, **more})


def rollout(*groups):
    return Rollout([Group(i, list(group)) for i, group in enumerate(groups)], {9: "lost"})


def test_each_position_is_scored_for_the_next_token_and_only_sampled_ones_count():
    pair = (trajectory(1.0, "..xx.x"), trajectory(0.0, ".x"))
    first, second = rollout_data(rollout(pair), **OPTIONS)
    assert first.tokens.tolist() == [10, 11, 12, 13, 14]
    assert first.targets.tolist() == [11, 12, 13, 14, 15]
    assert (first.weights != 0).tolist() == [False, True, True, False, True]
    inputs = first.loss_fn_inputs
    assert inputs["logprobs"][[1, 2, 4]].tolist() == np.float32([-0.2, -0.3, -0.5]).tolist()
    assert np.isnan(inputs["logprobs"][[0, 3]]).all()
    assert set(inputs["advantages"].tolist()) == {0.5}
    assert set(second.loss_fn_inputs["advantages"].tolist()) == {-0.5}
    assert "temperature" not in inputs and "kept" not in inputs


def test_means_are_over_tokens_samples_or_a_constant():
    groups = rollout((trajectory(1.0, ".xxx"), trajectory(0.0, ".x")))

    def weights(aggregation):
        data = rollout_data(groups, **{**OPTIONS, "aggregation": aggregation})
        return [float(datum.weights.max()) for datum in data]

    assert weights("token") == pytest.approx([1 / 4, 1 / 4])
    assert weights("sequence") == pytest.approx([1 / 6, 1 / 2])
    assert weights("constant") == pytest.approx([1 / 10, 1 / 10])


def test_advantages_stay_within_their_group():
    low = (trajectory(0.0, ".x"), trajectory(0.2, ".x"))
    high = (trajectory(10.0, ".x"), trajectory(10.0, ".x"))
    data = rollout_data(rollout(low, high), **{**OPTIONS, "advantage": "grpo"})
    worth = [float(datum.loss_fn_inputs["advantages"][0]) for datum in data]
    assert worth == [-1.0, 1.0, 0.0, 0.0]


def test_temperature_and_kept_sets_shape_sampled_tokens_only():
    kept = np.asarray([[0xFFFFFFFF], [5], [0xFFFFFFFF], [6]], np.uint32)
    pair = [trajectory(r, ".x.x", kept=kept) for r in (0.0, 1.0)]
    datum = rollout_data(rollout(pair), **{**OPTIONS, "temperature": 0.5})[0]
    assert datum.loss_fn_inputs["temperature"].tolist() == [0.5, 1.0, 0.5]
    assert datum.loss_fn_inputs["kept"][:, 0].tolist() == [5, 0xFFFFFFFF, 6]


def test_answers_of_demonstrations_count_alike_and_their_prompts_do_not():
    first, second = demonstration_data([([1, 2, 3], [4, 5]), ([1], [2, 3, 4])])
    assert first.targets[first.weights != 0].tolist() == [4, 5]
    assert second.targets[second.weights != 0].tolist() == [2, 3, 4]
    assert {float(w) for d in (first, second) for w in d.weights if w} == {float(np.float32(0.2))}


def test_counted_picks_the_tokens_that_count():
    data = demonstration_data([([1, 2, 3], [4, 5])])
    assert counted(data, [np.arange(4.0)])[0].tolist() == [2.0, 3.0]


def test_a_group_of_one_is_refused():
    with pytest.raises(GlmError, match="group 0 has one sample"):
        rollout_data(rollout((trajectory(1.0, ".x"),)), **OPTIONS)


def test_metrics_are_means_over_trajectories_and_what_nobody_reported_is_absent():
    groups = rollout(
        (trajectory(1.0, ".xx", metrics={"correct": 1.0}), trajectory(0.0, ".xxxx", cut=True)),
        (trajectory(0.5, ".x", metrics={"odd": 4.0}), trajectory(0.5, ".x")),
    )
    metrics = rollout_metrics(groups)
    assert metrics["reward/mean"] == 0.5 and metrics["tokens/generated"] == 8
    assert metrics["length/mean"] == 2.0 and metrics["length/cut_frac"] == 0.25
    assert metrics["groups/equal_frac"] == 0.5 and metrics["groups/dropped"] == 1
    assert metrics["reward/correct"] == 1.0 and metrics["env/odd"] == 4.0
    sampled = [0.1, 0.2, 0.1, 0.2, 0.3, 0.4, 0.1, 0.1]
    assert metrics["entropy/sampled"] == pytest.approx(np.mean(sampled))
    plain = rollout_metrics(rollout((trajectory(1.0, ".x"), trajectory(0.0, ".x"))))
    assert "reward/correct" not in plain


def test_rates_rise_to_the_peak_then_follow_their_schedule():
    def rates(schedule, warmup=2):
        return [learning_rate(i, 6, 1.0, schedule, warmup) for i in range(6)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates("cosine")[2] == 1 and rates("cosine")[4] == pytest.approx(0.5)
    assert rates("linear", warmup=0)[0] == 1 and learning_rate(0, 1, 1.0, "cosine", 1) == 1
