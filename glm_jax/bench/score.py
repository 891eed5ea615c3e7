"""How fast log-probabilities of given tokens are, pinned and native, through the one forward."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from glm_jax.batch import TokenBatch
from glm_jax.bench.measure import Measured, Progress, comparisons, measure
from glm_jax.bench.peer import Peer
from glm_jax.bench.program import MODES, Program, compiled, flat
from glm_jax.bench.work import Rectangle
from glm_jax.cache import LatentCache
from glm_jax.checks import check_batch
from glm_jax.errors import GlmError
from glm_jax.forward import forward
from glm_jax.head import score
from glm_jax.model import GlmModel
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract

PAIRS = {"pinned": ("native", "peer"), "native": ("peer",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreBench(Rectangle):
    """What is measured: a batch scored a few sequences at a time."""

    batch: int = 64
    micro_batch: int = 8
    """Sequences of one forward."""

    def __post_init__(self):
        super().__post_init__()
        self.require_positive("micro_batch")
        if self.batch % self.micro_batch:
            raise GlmError(
                f"--micro-batch {self.micro_batch}: does not divide --batch {self.batch}; choose "
                "one that does"
            )


def bench_score(
    bench: ScoreBench, *, peer: Peer | None = None, progress: Progress = lambda step: None
) -> dict[str, Any]:
    """Measures both modes, and the peer's scoring; see `Measured` for the figures' meaning."""

    def figures(measured: Measured) -> dict[str, Any]:
        work = {"n_tokens": bench.n_tokens, "flops": bench.forward_flops}
        rates = {name: measured.rates(name, **work) for name in (*MODES, "peer")}
        return rates | {"comparisons": comparisons(measured, PAIRS)}

    return measure(
        bench,
        lambda cfg: scoring_programs(bench, GlmModel.init(cfg), bench.micro_batch),
        figures,
        peer=peer,
        progress=progress,
        tokens=bench.n_tokens,
        batch=bench.batch,
        micro_batch=bench.micro_batch,
        length=bench.length,
        flops=bench.forward_flops,
    )


def scoring_programs(bench: Rectangle, model: GlmModel, micro_batch: int) -> dict[str, Program]:
    """The scoring program of each mode."""
    return {
        mode: scoring_program(bench, model, contract(), micro_batch)
        for mode, contract in MODES.items()
    }


def scoring_program(
    bench: Rectangle, model: GlmModel, contract: NumericsContract, micro_batch: int
) -> Program:
    """Scores every token of the rectangle through a cache; returns `[batch * length]`."""
    cfg, ops, n = model.cfg, Arithmetic(contract), micro_batch * bench.length
    leaves, build = flat(model)

    def empty() -> LatentCache:
        return LatentCache.empty(cfg, micro_batch, bench.length, contract=contract)

    def scored(leaves, batch: TokenBatch, targets_T):
        model = build(leaves)
        hidden_TD = forward(model, batch, empty()).hidden_TD
        return score(model, ops, hidden_TD, targets_T, batch.n_used).target_T[:n]

    ids_BS, parts = bench.ids_BS, []
    for first in range(0, bench.batch, micro_batch):
        part_BS = ids_BS[first : first + micro_batch]
        batch = TokenBatch.from_sequences(cfg, part_BS).padded(ops.bucket(n))
        parts.append((batch, _rows(successors(part_BS), batch.n_tokens)))
    check_batch(cfg, parts[0][0], empty(), parts[0][1], contract=contract)
    executable, seconds = compiled(scored, leaves, *parts[0])

    def run():
        done = []
        for part in parts:
            done.append(executable(leaves, *part).block_until_ready())
        return jnp.concatenate(done), None

    return Program(contract=contract, compile_s=seconds, run=run)


def successors(ids_BS: np.ndarray) -> np.ndarray:
    """The id after each token; the first one's after the last. `[B, S]`."""
    return np.roll(ids_BS, -1, axis=1).astype(np.int32)


def _rows(values_BS: np.ndarray, n_rows: int) -> Int[Array, "T"]:
    """The rectangle as a flat list, zeros after it."""
    return jnp.asarray(np.pad(values_BS.reshape(-1), (0, n_rows - values_BS.size)))
