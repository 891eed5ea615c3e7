"""A model that compiles in seconds, engines of it, and bits to compare."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves
from glm_jax.presets import preset
from serving.engine import Completion, Engine, SamplingParams

CFG = preset("tiny").with_overrides(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    index_topk=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    mlp_layer_types=("dense", "sparse"),
    indexer_types=("full", "shared"),
    num_nextn_predict_layers=0,
)
"""Selection bites from 9 tokens on; the vocabulary is no multiple of a word or a vector."""

PAGE = 16
SIZES = {"n_slots": 8, "capacity": 80, "n_pages": 14, "n_rows": 64, "n_steps": 4}
"""All engines of these tests share their programs. The pool is too small for eight long ones."""

EOS = 3
FILTERS = {"top_p": 0.9, "top_k": 20, "min_p": 0.02, "min_tokens": 2, "stop_ids": (EOS, 5)}


def contract(mode="pinned"):
    return NumericsContract(mode=mode, key_block=PAGE, token_leaf=32)


def changed(model, **changes):
    """A model with some leaves replaced: path (dots as `__`) to a function of the old value."""
    graphdef, state = nnx.split(model)
    state = jax.tree.map(lambda x: x, state)
    for path, variable in leaves(state):
        if (change := changes.get(path.replace(".", "__"))) is not None:
            variable.set_value(change(variable[...]))
    return nnx.merge(graphdef, state)


@functools.cache
def model(dtype="float32"):
    """A random model's distribution is flat; a larger head makes it one to sample from."""
    return changed(GlmModel.init(CFG.with_overrides(dtype=dtype)), lm_head=lambda x: x * 30)


@functools.cache
def flat_model():
    """All logits are equal."""
    return changed(model(), lm_head=jnp.zeros_like)


def new_engine(weights=None, mode="pinned", **options):
    return Engine(weights or model(), contract=contract(mode), **{**SIZES, **options})


@functools.cache
def engine(dtype="float32", mode="pinned"):
    """One engine for most tests: its history must not matter."""
    return new_engine(model(dtype), mode)


def prompt(n, seed=0):
    return np.random.default_rng((seed, n)).integers(0, CFG.vocab_size, n).tolist()


def params(**changes):
    return SamplingParams(**{"max_tokens": 12, "seed": 7, **changes})


KINDS = {
    "own": params(),
    "cold": params(temperature=0.6, stop_ids=(EOS,)),
    "filtered": params(temperature=0.8, **FILTERS),
    "greedy": params(temperature=0),
}


@functools.cache
def alone(kind, n, dtype="float32"):
    """What a request gives on an engine that sees nothing else for as long."""
    return engine(dtype).generate([prompt(n)], KINDS[kind])[0][0]


def words(array):
    """The bits of an f32 array."""
    return np.asarray(array).view(np.uint32).tolist()


def bits(completion: Completion):
    """Everything that must be the same whatever else the engine does."""
    kept = None if completion.kept is None else completion.kept.tolist()
    ids = completion.token_ids.tolist()
    return ids, words(completion.logprobs), words(completion.sampling_logprobs), kept


def run_dry(engine):
    """Steps until nothing is left; completions by request."""
    done = {}
    while engine.busy:
        for event in engine.step():
            if event.completion is not None:
                done.setdefault(event.request, []).append(event.completion)
    return done


def held_pages(engine):
    return engine._scheduler.pool.n_held
