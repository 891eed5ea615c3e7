"""A made-up run's directory."""

import dataclasses
import json
import math

import numpy as np

from rl.recipe import NumericsRecipe, Recipe
from rl.run_directory import EVALUATION, METRICS, RECIPE, SAMPLES, SUMMARY, WARM_START
from rl.weight_sync import STAGES


def write_run(path, mode="pinned", n_steps=25, **more):
    """A run that looks like one: pinned with KL 0, native without."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(0)
    recipe = Recipe(out=str(path), numerics=NumericsRecipe(mode=mode))
    (path / RECIPE).write_text(dataclasses.replace(recipe, **more).to_toml())
    native = mode == "native"
    steps = []
    for step in range(1, n_steps + 1):
        reward = 0.35 + 0.4 * (1 - math.exp(-step / 10)) + 0.02 * rng.normal()
        noise = abs(rng.normal()) * 1e-6 * native
        steps.append(
            {
                "step": step,
                "reward/mean": reward,
                "reward/correct": reward - 0.05,
                "kl/k1": noise / 3,
                "kl/k3": noise**2,
                "kl/max_abs": noise * 4,
                "kl/unequal_tokens": int(rng.integers(200, 500)) if native else 0,
                "ppo/clip_frac": 0.0,
                "tokens/generated": int(rng.integers(800, 900)),
                "length/mean": 6.5 + 0.1 * rng.normal(),
                "length/max": 12.0,
                "entropy/sampled": 1.2 * math.exp(-step / 15) + 0.02 * rng.normal(),
                "optim/grad_norm": 1 + 0.2 * rng.normal(),
                "time/generate": 0.2 + 0.02 * rng.random(),
                "time/update": 0.35,
                "time/sync": 0.004,
                **{f"time/{stage}": 0.001 for stage in STAGES},
                "time/step": 0.6,
                "weights/digest": f"{step:016x}",
            }
        )
    warm = [{"step": i + 1, "loss": 3 * math.exp(-i / 60) + 0.3} for i in range(200)]
    held_out = [
        {"step": step, "problems": 128, "reward/mean": r, "reward/correct": r}
        for step, r in ((0, 0.31), (n_steps, 0.62))
    ]
    samples = [
        {"step": s["step"], "problem": i, "prompt": "<bos>3,7,2=33:", "completion": c, "reward": r}
        for s in steps
        for i, (c, r) in enumerate((("3*7+12<eos>", 1.0), ("<b>3&7</b>", 0.0)))
    ]
    files = {WARM_START: warm, METRICS: steps, EVALUATION: held_out, SAMPLES: samples}
    for name, records in files.items():
        (path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {"weights/digest": "00ff" * 4, "numerics/digest": "abcd" * 4}
    (path / SUMMARY).write_text(json.dumps(summary))
    return path
