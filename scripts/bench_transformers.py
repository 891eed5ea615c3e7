"""Times the forward of transformers' GlmMoeDsaForCausalLM, one timing per request.

`glm-jax bench forward --peer-python PATH` starts this file with the Python of an environment that
has torch and transformers (5.24 or later); this project never imports it. Argument: a JSON object
with config, batch, length, threads and dtypes. The protocol is described in glm_jax/bench/peer.py.
By hand: `python scripts/bench_transformers.py "$WORK"`, then type a dtype and Enter.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
import time
from typing import Any


def load(work: dict[str, Any], dtype: str) -> Any:
    """A randomly initialised model of the given dtype, in evaluation mode."""
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(0)
    config = GlmMoeDsaConfig.from_dict(work["config"])
    return GlmMoeDsaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).eval()


def main() -> None:
    """Answers requests until stdin ends."""
    # Libraries print to stdout too; keep the protocol's own, and send the rest to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    work = json.loads(sys.argv[1])
    import torch
    import transformers

    torch.set_num_threads(work["threads"])
    torch.set_grad_enabled(False)
    models = {dtype: load(work, dtype) for dtype in work["dtypes"]}
    ids = torch.randint(work["config"]["vocab_size"], (work["batch"], work["length"]))
    answer(torch=torch.__version__, transformers=transformers.__version__)

    for request in sys.stdin:
        model = models.get(request.strip())
        if model is None:
            answer(error=f"dtype {request.strip()!r} was not asked for at the start")
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        logits = model(input_ids=ids, use_cache=False).logits
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if logits.shape[:2] != ids.shape or not bool(logits[:, -1].isfinite().all()):
            answer(error="the logits are not finite, or not one row a token")
            continue
        answer(wall_s=wall, cpu_s=cpu)


if __name__ == "__main__":
    main()
