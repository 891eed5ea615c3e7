"""What `scripts/gpu_check.sh` runs: each step a process of its own with its share of the time.

A step that fails or runs out of time is written down and the next one begins; the JSON is written
anew after every step, so that a lost machine costs only what came after.
"""

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

LIMIT = 540.0
"""Seconds in all."""
DRY_SLOWER = 10
"""A CPU compiles on few cores: a dry run may take so many times as long."""

MODEL = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "vocab_size": 32768,
    "index_topk": 512,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "index_share_for_mtp_iteration": False,
    "eos_token_id": (),
    "pad_token_id": 0,
}
"""GLM-5.2 with fewer, narrower layers: about 2e9 weights, as they are drawn on the host and the
time is short. It does not fill the card; the batch is what makes the products large."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One process. The last JSON value that it prints is its result."""

    name: str
    command: tuple[str, ...]
    seconds: int
    """After which it is ended."""


def steps(dry: bool, config: Path) -> Iterator[Step]:
    """What is run, in order of importance."""
    python = sys.executable
    run = (str(Path(python).parent / "glm-jax"),)
    tests = (python, "-m", "pytest", "-q", "-n0", "-m", "device", "tests")
    yield Step("device_tests", (*tests, *(("--collect-only",) if dry else ())), 80)
    model, trials = ("tiny", "1") if dry else ("small", "1")
    for dtype in ("bfloat16", "float32"):
        options = ("--model", model, "--trials", trials, "--dtype", dtype, "--json")
        yield Step(f"invariance_{dtype}", (*run, "check", "invariance", *options), 90)
    yield Step(
        "operations",
        (python, "scripts/gpu_check_operations.py", *(("--dry-run",) if dry else ())),
        80,
    )
    size = ("2", "16") if dry else ("8", "1024")
    common = ("--config", str(config), "--dtype", "float32" if dry else "bfloat16", "--json")
    for name in ("forward", "train"):
        sizes = ("--batch", size[0], "--length", size[1], "--repeats", "1" if dry else "3")
        yield Step(name, (*run, "bench", name, *common, *sizes), 70)
    counts = ("--sequences", "2") if dry else ("--sequences", "1", "--sequences", "64")
    context = ("--context", "8", "--capacity", "32", "--steps", "2", "--prompt", "8")
    short = (*context, "--new-tokens", "4", "--repeats", "1") if dry else ("--repeats", "3")
    yield Step("decode", (*run, "bench", "decode", *common, *counts, *short), 60)


def main() -> int:
    """Runs the steps; exit status 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Checks and measurements on one GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on this CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    asked = parser.parse_args()
    environment = dict(os.environ)
    if asked.dry_run:
        environment["JAX_PLATFORMS"] = "cpu"
    config = asked.out.with_suffix(".config.json")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(_config(asked.dry_run), indent=1))
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "dry_run": asked.dry_run}
    found |= {"model": json.loads(config.read_text()), "steps": {}}
    begun, slower = time.monotonic(), DRY_SLOWER if asked.dry_run else 1
    for step in steps(asked.dry_run, config):
        step = dataclasses.replace(step, seconds=step.seconds * slower)
        left = LIMIT * slower - (time.monotonic() - begun)
        print(f"{step.name}: {min(step.seconds, left):.0f} s at most", flush=True)
        found["steps"][step.name] = run(step, left, environment)
        found["seconds"] = round(time.monotonic() - begun, 1)
        found["ok"] = all(x["ok"] for x in found["steps"].values())
        asked.out.write_text(json.dumps(found, indent=1, allow_nan=False))
    config.unlink()
    failed = [name for name, x in found["steps"].items() if not x["ok"]]
    print(f"{asked.out}: " + (f"failed: {', '.join(failed)}" if failed else "all steps passed"))
    return 1 if failed else 0


def run(step: Step, left: float, environment: dict[str, str]) -> dict[str, Any]:
    """One step: whether it passed, how long it took, what it said."""
    if left < 5:
        return {"ok": False, "seconds": 0.0, "error": "not begun: no time was left"}
    begun = time.monotonic()
    try:
        done = subprocess.run(
            step.command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=min(step.seconds, left),
            check=False,
        )
    except subprocess.TimeoutExpired:
        seconds = round(time.monotonic() - begun, 1)
        return {"ok": False, "seconds": seconds, "error": "ended: it ran out of time"}
    result: dict[str, Any] = {
        "ok": done.returncode == 0,
        "seconds": round(time.monotonic() - begun, 1),
        "status": done.returncode,
    }
    try:
        result["result"] = json.loads(done.stdout)
    except json.JSONDecodeError:
        result["output"] = done.stdout[-2000:]
    if done.returncode:
        result["error"] = done.stderr[-2000:]
    return result


def _config(dry: bool) -> dict[str, Any]:
    from glm_jax.config_fields import dense_first
    from glm_jax.presets import preset

    if dry:
        return preset("tiny").to_hf()
    n = MODEL["num_hidden_layers"]
    kinds = {"mlp_layer_types": dense_first(1, n), "indexer_types": ("full",) * n}
    return preset("glm-5.2").with_overrides(**MODEL, **kinds).to_hf()


if __name__ == "__main__":
    sys.exit(main())
