"""Advantages of samples within the group that answers the same prompt."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from glm_jax.config_fields import nearest
from glm_jax.errors import GlmError

AdvantageKind = Literal["grpo", "rloo", "dr_grpo"]
KINDS = ("grpo", "rloo", "dr_grpo")


def advantages(
    rewards: Sequence[float], groups: Sequence[int], kind: AdvantageKind = "grpo"
) -> np.ndarray:
    """How much better each sample is than its group.

    `grpo`: (r - mean) / std; `rloo`: r - mean of the others; `dr_grpo`: r - mean. A group of equal
    rewards gives exactly 0. Sums are taken over sorted rewards, so that order does not matter.

    Args:
        rewards: of each sample.
        groups: number of the group that each sample belongs to.
        kind: which formula.

    Returns:
        `[n]`, f32.

    Raises:
        GlmError: an unknown kind, a reward that is not finite, a group of one, or rewards so far
            apart or so close that f32 cannot hold their advantages.
    """
    if kind not in KINDS:
        raise GlmError(f"advantage {kind!r}: {nearest(kind, KINDS)}use one of {', '.join(KINDS)}")
    reward_n, group_n = np.asarray(rewards, np.float64), np.asarray(groups)
    if reward_n.shape != group_n.shape or reward_n.ndim != 1:
        raise GlmError(f"advantages: {reward_n.shape} rewards for {group_n.shape} groups; need one")
    if not np.isfinite(reward_n).all():
        bad = np.flatnonzero(~np.isfinite(reward_n))[0]
        raise GlmError(f"advantages: the reward of sample {bad} is {reward_n[bad]}; drop its group")
    out = np.zeros(reward_n.shape)
    for group in np.unique(group_n):
        mine = group_n == group
        n = int(mine.sum())
        if n < 2:
            raise GlmError(f"advantages: group {group} has one sample; a group needs two or more")
        reward = np.sort(reward_n[mine])
        if reward[0] == reward[-1]:
            continue
        with np.errstate(all="ignore"):  # looked at below
            out[mine] = _of_group(reward_n[mine], reward, kind).astype(np.float32)
        if not np.isfinite(out[mine]).all():
            raise GlmError(
                f"advantages: rewards of group {group} from {reward[0]} to {reward[-1]} have no "
                "advantages in 32 bits; scale them"
            )
    return out.astype(np.float32)


def _of_group(reward_n: np.ndarray, sorted_n: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    n = len(reward_n)
    mean = sorted_n.sum() / n
    if kind == "grpo":
        return (reward_n - mean) / np.sqrt(((sorted_n - mean) ** 2).sum() / n)
    return (reward_n - mean) * n / (n - 1) if kind == "rloo" else reward_n - mean
