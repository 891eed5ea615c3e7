"""How fast a forward over a full rectangle of tokens is.

Three programs: logits of every token by stock XLA without a cache, and log-probabilities of given
tokens through a cache, pinned and native.
"""

from typing import Any

import jax

from glm_jax.batch import TokenBatch
from glm_jax.bench.measure import Measured, Progress, comparisons, measure
from glm_jax.bench.peer import Peer
from glm_jax.bench.program import MODES, Program, compiled, flat
from glm_jax.bench.score import PAIRS, scoring_programs
from glm_jax.bench.work import DTYPES, Rectangle
from glm_jax.config import GlmConfig
from glm_jax.forward import forward
from glm_jax.model import GlmModel

__all__ = ["DTYPES", "ForwardBench", "bench_forward"]


class ForwardBench(Rectangle):
    """What is measured."""


def bench_forward(
    bench: ForwardBench, *, peer: Peer | None = None, progress: Progress = lambda step: None
) -> dict[str, Any]:
    """Measures and returns the figures under stable keys; rates are per second.

    Each round runs the three programs, every dense product, and the peer's forward (logits).
    The entries at the top of a result are those of our logits; `ratio` and `cpu_ratio` are tokens
    per second (of time, of CPU) ours over theirs, round by round. `pinned` and `native` are the
    scoring programs. Figures of an absent peer are null.
    """
    return measure(
        bench,
        lambda cfg: programs(bench, cfg),
        lambda measured: _figures(bench, measured),
        peer=peer,
        progress=progress,
        tokens=bench.n_tokens,
        batch=bench.batch,
        length=bench.length,
        flops=bench.forward_flops,
    )


def programs(bench: ForwardBench, cfg: GlmConfig) -> dict[str, Program]:
    """The programs for the config's dtype."""
    model = GlmModel.init(cfg)
    return {
        "logits": logits_program(bench, model),
        **scoring_programs(bench, model, bench.batch),
    }


def logits_program(bench: Rectangle, model: GlmModel) -> Program:
    """Logits of every token, native, attending within the batch."""
    leaves, build = flat(model)
    batch = TokenBatch.from_sequences(model.cfg, bench.ids_BS)

    def logits(leaves, batch: TokenBatch) -> jax.Array:
        model = build(leaves)
        return model.logits(forward(model, batch).hidden_TD)

    executable, seconds = compiled(logits, leaves, batch)
    return Program(
        contract=MODES["native"](),
        compile_s=seconds,
        run=lambda: (executable(leaves, batch), None),
    )


def _figures(bench: ForwardBench, measured: Measured) -> dict[str, Any]:
    work = {"n_tokens": bench.n_tokens, "flops": bench.forward_flops}
    ours, peer = measured.rates("logits", **work), measured.rates("peer", **work)
    assert ours is not None
    ratio = measured.versus("logits", "peer")
    return ours | {
        "peer_tokens_per_s": peer and peer["tokens_per_s"],
        "peer_tokens_per_cpu_s": peer and peer["tokens_per_cpu_s"],
        "ratio": ratio and ratio["speed"],
        "cpu_ratio": ratio and ratio["cpu_speed"],
        **{mode: measured.rates(mode, **work) for mode in MODES},
        "comparisons": comparisons(measured, PAIRS),
    }
