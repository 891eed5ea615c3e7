"""Times transformers' GlmMoeDsaForCausalLM, one timing per request.

`glm-jax bench forward --peer-python PATH` (and `score`, `train`, `decode`) starts this file with
the Python of an environment that has torch and transformers (5.24 or later); this project never
imports it.
Argument: a JSON object with task, config, batch, micro_batch, length, threads and dtypes (and
new_tokens, for `generate`). A request is a dtype, and perhaps a smaller number of sequences. The
protocol is described in glm_jax/bench/peer.py.
By hand: `python scripts/bench_transformers.py "$WORK"`, then type a dtype and Enter.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def load(work: dict[str, Any], dtype: str) -> Any:
    """A randomly initialised model of the given dtype, in evaluation mode."""
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(0)
    config = GlmMoeDsaConfig.from_dict(work["config"])
    return GlmMoeDsaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).eval()


def forward(model: Any, ids: Any, work: dict[str, Any]) -> Any:
    """Logits of every token; returns those of the last ones."""
    logits = model(input_ids=ids, use_cache=False).logits
    return logits[:, -1] if logits.shape[:2] == ids.shape else logits.new_tensor(float("nan"))


def score(model: Any, ids: Any, work: dict[str, Any]) -> Any:
    """Log-probabilities of every token's successor (the last one's is the first)."""
    import torch

    done = [
        _losses(model, part, part.roll(-1, dims=1), "none")
        for part in ids.split(work["micro_batch"])
    ]
    return -torch.cat(done)


def train(model: Any, ids: Any, work: dict[str, Any]) -> Any:
    """Mean loss of every token's successor, with the gradients of all parameters."""
    loss = _losses(model, ids, ids.roll(-1, dims=1), "mean")
    loss.backward()
    return loss.detach()


def generate(model: Any, ids: Any, work: dict[str, Any]) -> Any:
    """Sampled continuations of the prompts, at temperature 1 and without filters."""
    n = work["new_tokens"]
    length = {"min_new_tokens": n, "max_new_tokens": n, "pad_token_id": 0}
    all_ids = model.generate(
        ids, attention_mask=ids.new_ones(ids.shape), do_sample=True, top_k=0, **length
    )
    new = all_ids[:, ids.shape[1] :].float()
    return new if new.shape[1] == n else new.new_tensor(float("nan"))


TASKS: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {
    "forward": forward,
    "generate": generate,
    "score": score,
    "train": train,
}


def _losses(model: Any, ids: Any, targets: Any, reduction: str) -> Any:
    import torch

    logits = model(input_ids=ids, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction=reduction
    )


def main() -> None:
    """Answers requests until stdin ends."""
    # Libraries print to stdout too; keep the protocol's own, and send the rest to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    work = json.loads(sys.argv[1])
    if work["task"] not in TASKS:
        sys.exit(f"task {work['task']!r} is unknown: use one of {', '.join(TASKS)}")
    task = TASKS[work["task"]]
    import torch
    import transformers

    torch.set_num_threads(work["threads"])
    torch.set_grad_enabled(task is train)
    models = {dtype: load(work, dtype) for dtype in work["dtypes"]}
    all_ids = torch.randint(work["config"]["vocab_size"], (work["batch"], work["length"]))
    answer(torch=torch.__version__, transformers=transformers.__version__)

    for request in sys.stdin:
        dtype, *numbers = request.split()
        model = models.get(dtype)
        if model is None:
            answer(error=f"dtype {dtype!r} was not asked for at the start")
            continue
        ids = all_ids[: int(numbers[0])] if numbers else all_ids
        model.zero_grad(set_to_none=True)
        wall, cpu = time.perf_counter(), time.process_time()
        values = task(model, ids, work)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not bool(values.isfinite().all()):
            answer(error="the values are not finite, or not one row a token")
            continue
        answer(wall_s=wall, cpu_s=cpu)


if __name__ == "__main__":
    main()
