"""Learning rates by step."""

import math

from rl.recipe import Schedule


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule, warmup: int) -> float:
    """The rate of step `step` (from 0) of `steps`.

    It rises linearly over `warmup` steps, the last of which has the peak; then it stays, or falls
    towards 0, which it would reach one step after the last.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    factors = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }
    return peak * factors[schedule]
