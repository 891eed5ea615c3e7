"""A small model, its trainers and data for them; one set of compiled programs serves the tests."""

import functools

import jax
import numpy as np

from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.presets import preset
from rl.datum import Datum
from rl.optimizer import AdamParams
from rl.trainer import Trainer, TrainerConfig

CFG = preset("tiny").with_overrides(
    vocab_size=48,
    num_hidden_layers=2,
    index_topk=8,
    first_k_dense_replace=1,
    mlp_layer_types=("dense", "sparse"),
    indexer_types=("full", "shared"),
    num_nextn_predict_layers=0,
)
CONFIG = TrainerConfig(rows_per_batch=64, max_length=32, max_chunks=31)
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=1.0, weight_decay=0.01)


@functools.cache
def contract(mode="pinned"):
    return NumericsContract(mode=mode, token_leaf=16, key_block=16)


@functools.cache
def model(dtype="float32"):
    return GlmModel.init(CFG.with_overrides(dtype=dtype))


def trainer(dtype="float32", mode="pinned"):
    return Trainer(model(dtype), contract=contract(mode), config=CONFIG)


def changed(datum, **inputs):
    """The datum with other inputs."""
    return Datum(datum.tokens, {**datum.loss_fn_inputs, **inputs})


def hashes(t):
    """Bits of every master and moment."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(t._opt)]


@functools.cache
def data(n=6):
    rng = np.random.default_rng(0)
    out = []
    for length in (20, 7, 31, 12, 20, 3)[:n]:
        tokens = rng.integers(0, CFG.vocab_size, length)
        inputs = {
            "target_tokens": np.roll(tokens, -1),
            "weights": (np.arange(length) > 1) * (np.arange(length) < length - 1),
            "logprobs": rng.normal(-3.8, 0.1, length),
            "advantages": np.full(length, rng.normal()),
        }
        out.append(Datum(tokens, inputs))
    return out


def stepped(batches, loss="ppo", dtype="float32", **more):
    t = trainer(dtype)
    for batch in batches:
        t.forward_backward(batch, loss, **more)
    metrics = t.optim_step(ADAM)
    return t, metrics
