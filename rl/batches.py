"""Training data of rollouts and demonstrations, and the metrics of a rollout."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rl.advantages import AdvantageKind, advantages
from rl.datum import Datum
from rl.envs import Demonstration
from rl.rollout import Rollout, Trajectory

Aggregation = Literal["token", "sequence", "constant"]


def demonstration_data(demonstrations: Sequence[Demonstration]) -> list[Datum]:
    """Cross-entropy data: weights of the answers' tokens sum to 1 over all of them."""
    total = sum(len(answer) for _, answer in demonstrations)
    data = []
    for prompt, answer in demonstrations:
        tokens = np.asarray([*prompt, *answer], np.int32)
        weights = np.zeros(len(tokens) - 1, np.float32)
        weights[len(prompt) - 1 :] = 1 / total
        data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights}))
    return data


def rollout_data(
    rollout: Rollout,
    *,
    advantage: AdvantageKind,
    aggregation: Aggregation,
    max_tokens: int,
    temperature: float,
) -> list[Datum]:
    """Policy-gradient data, one datum a trajectory, group by group.

    The loss is summed over tokens, so a mean is a matter of weights: `token` gives each sampled
    token the same, `sequence` each trajectory, `constant` divides by trajectories and `max_tokens`.

    Raises:
        GlmError: a group of one.
    """
    trajectories = [t for group in rollout.groups for t in group.trajectories]
    owners = [i for i, group in enumerate(rollout.groups) for _ in group.trajectories]
    worth = advantages([t.reward for t in trajectories], owners, advantage)
    lengths = [int(t.sampled.sum()) for t in trajectories]
    each = {
        "token": [sum(lengths)] * len(lengths),
        "sequence": [len(lengths) * length for length in lengths],
        "constant": [len(lengths) * max_tokens] * len(lengths),
    }[aggregation]
    return [
        _datum(trajectory, float(a), 1 / n, temperature)
        for trajectory, a, n in zip(trajectories, worth, each, strict=True)
    ]


def _datum(trajectory: Trajectory, advantage: float, weight: float, temperature: float) -> Datum:
    sampled = trajectory.sampled[1:]
    inputs = {
        "target_tokens": trajectory.tokens[1:],
        "weights": np.where(sampled, np.float32(weight), np.float32(0)),
        "logprobs": trajectory.logprobs[1:],
        "advantages": np.full(sampled.shape, advantage, np.float32),
    }
    if temperature != 1:
        inputs["temperature"] = np.where(sampled, np.float32(temperature), np.float32(1))
    if trajectory.kept is not None:
        inputs["kept"] = trajectory.kept[1:]
    return Datum(trajectory.tokens[:-1], inputs)


def counted(data: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of each datum, the log-probabilities of the tokens that count."""
    return [x[datum.weights != 0] for datum, x in zip(data, logprobs, strict=True)]


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Rewards, lengths and what the environment reported, as means over trajectories."""
    trajectories = [t for group in rollout.groups for t in group.trajectories]
    reward = np.asarray([t.reward for t in trajectories])
    lengths = np.asarray([t.sampled.sum() for t in trajectories])
    sampled = np.concatenate([t.logprobs[t.sampled] for t in trajectories]).astype(np.float64)
    equal = [len({t.reward for t in group.trajectories}) == 1 for group in rollout.groups]
    metrics = {
        "reward/mean": float(reward.mean()),
        "reward/std": float(reward.std()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/cut_frac": float(np.mean([t.cut for t in trajectories])),
        # The mean of -log p of what was sampled: an unbiased estimate, per token.
        "entropy/sampled": float(-sampled.mean()),
        "groups/equal_frac": float(np.mean(equal)),
        "groups/dropped": len(rollout.dropped),
        "tokens/generated": int(lengths.sum()),
        "turns/mean": float(np.mean([t.n_turns for t in trajectories])),
    }
    for name in sorted({name for t in trajectories for name in t.metrics}):
        values = [t.metrics[name] for t in trajectories if name in t.metrics]
        metrics[f"env/{name}"] = float(np.mean(values))
    if "env/correct" in metrics:
        metrics["reward/correct"] = metrics.pop("env/correct")
    return metrics
