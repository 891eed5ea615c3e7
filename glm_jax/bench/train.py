"""How fast forward and backward are: the pinned ones, and stock autodiff of the native forward.

The loss is the mean of the negative log-probabilities of given tokens. Every program gives the loss
and the gradient of every parameter.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from glm_jax.batch import TokenBatch
from glm_jax.bench.measure import Measured, Progress, comparisons, measure
from glm_jax.bench.peer import Peer
from glm_jax.bench.program import MODES, Program, compiled, flat
from glm_jax.bench.score import successors
from glm_jax.bench.work import Rectangle
from glm_jax.config import GlmConfig
from glm_jax.forward import forward
from glm_jax.head import token_logprobs
from glm_jax.model import GlmModel
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.sizes import Sizes
from glm_jax.training import accumulate, backward
from glm_jax.training.pack import TrainBatch, pack

PROGRAMS = ("pinned", "native", "native_remat")
PAIRS = {
    "pinned": ("native", "native_remat", "peer"),
    "native": ("peer",),
    "native_remat": ("peer",),
}


class TrainBench(Rectangle):
    """What is measured."""

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward: 3 x forward, whatever is recomputed."""
        return self.batch * Sizes.of(self.cfg).work(0, self.length).training


def bench_train(
    bench: TrainBench, *, peer: Peer | None = None, progress: Progress = lambda step: None
) -> dict[str, Any]:
    """Measures the three programs, and the peer's forward and backward."""

    def figures(measured: Measured) -> dict[str, Any]:
        work = {"n_tokens": bench.n_tokens, "flops": bench.flops}
        rates = {name: measured.rates(name, **work) for name in (*PROGRAMS, "peer")}
        return rates | {"comparisons": comparisons(measured, PAIRS)}

    return measure(
        bench,
        lambda cfg: programs(bench, cfg),
        figures,
        peer=peer,
        progress=progress,
        tokens=bench.n_tokens,
        batch=bench.batch,
        length=bench.length,
        flops=bench.flops,
    )


def programs(bench: TrainBench, cfg: GlmConfig) -> dict[str, Program]:
    """The programs for the config's dtype."""
    model = GlmModel.init(cfg)
    return {
        "pinned": pinned_program(bench, model),
        "native": native_program(bench, model, remat=False),
        "native_remat": native_program(bench, model, remat=True),
    }


def pinned_program(bench: TrainBench, model: GlmModel) -> Program:
    """The engine's forward, then the backward from what it saved: two executables.

    Returns the loss `[1]`, and gradients in f32 by parameter path. What is recomputed in the
    backward: projections, norms, attention weights, and the feed-forward with its router; not the
    index scores, the selection, or the mixing.
    """
    contract, n = MODES["pinned"](), bench.n_tokens
    train = pack_all(bench, model.cfg)
    room = (
        accumulate.bits(-(-bench.length // contract.token_leaf)),
        accumulate.bits(bench.batch),
    )
    leaves, build = flat(model)

    def first(leaves, train: TrainBatch):
        return backward.train_forward(build(leaves), train, contract)

    def second(leaves, train: TrainBatch, logprob_T, saved):
        model = build(leaves)
        valid_T = train.batch.valid_T
        d_logprob_T = jnp.where(valid_T, jnp.float32(-1.0 / n), 0.0)
        state = backward.initial(model, *room)
        state = backward.backward(model, train, saved, d_logprob_T, state, contract)
        loss = -jnp.sum(jnp.where(valid_T, logprob_T, 0.0), keepdims=True) / n
        return loss, backward.gradients(model, state)

    shapes = jax.eval_shape(first, leaves, train)
    run_first, seconds = compiled(first, leaves, train)
    run_second, more = compiled(second, leaves, train, *shapes)

    def run():
        return run_second(leaves, train, *run_first(leaves, train))

    return Program(contract=contract, compile_s=seconds + more, run=run)


def pack_all(bench: TrainBench, cfg: GlmConfig) -> TrainBatch:
    """The rectangle, packed into whole row tiles."""
    contract, ids_BS = MODES["pinned"](), bench.ids_BS
    n_rows = Arithmetic(contract).bucket(ids_BS.size)
    targets = list(successors(ids_BS))
    train, _ = pack(cfg, contract, list(ids_BS), targets, n_rows=n_rows, max_length=bench.length)
    return train


def native_program(bench: TrainBench, model: GlmModel, *, remat: bool) -> Program:
    """`value_and_grad` of the loss through the native forward without a cache.

    Returns the loss `[1]`, and gradients in the parameters' dtype. With `remat` the backward starts
    by running the whole forward again (`jax.checkpoint` around all of it): the model has no
    checkpoints a layer. That recomputes more than the pinned backward does.
    """
    batch = TokenBatch.from_sequences(model.cfg, bench.ids_BS)
    target_T = jnp.asarray(successors(bench.ids_BS).reshape(-1))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, batch, target_T):
        model = nnx.merge(graphdef, params, rest)
        return -jnp.mean(token_logprobs(model, forward(model, batch).hidden_TD, target_T))

    def step(*args):
        value, gradients = jax.value_and_grad(jax.checkpoint(loss) if remat else loss)(*args)
        return value[None], gradients

    args = (params, rest, batch, target_T)
    executable, seconds = compiled(step, *args)
    return Program(contract=MODES["native"](), compile_s=seconds, run=lambda: executable(*args))
