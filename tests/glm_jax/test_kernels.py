"""The model by its kernels: the contract chooses them, and in interpret mode no bit changes."""

import dataclasses

import jax
import numpy as np
import pytest

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.forward import forward
from glm_jax.head import token_logprobs
from glm_jax.numerics.arithmetic import Arithmetic
from tests.glm_jax.models import PINNED, THREE, ids, model_of

T = 12
KERNELS = dataclasses.replace(PINNED, kernels="pallas")


def logprobs(cfg, contract):
    """Hidden states and log-probabilities of a sequence read at once, and the program's text."""
    model, tokens = model_of(cfg), ids(1, T + 1, cfg=cfg)
    batch = TokenBatch.from_sequences(cfg, tokens[:, :T])
    cache = LatentCache.empty(cfg, 1, 16, contract=contract)

    @jax.jit
    def run(model, batch, cache, targets_T):
        hidden_TD = forward(model, batch, cache, contract=contract).hidden_TD
        padded_T = jax.numpy.zeros(hidden_TD.shape[0], targets_T.dtype).at[:T].set(targets_T)
        ops = Arithmetic(contract)
        return hidden_TD[:T], token_logprobs(model, hidden_TD, padded_T, ops)[:T]

    args = (model, batch, cache, tokens[0, 1:])
    return [np.asarray(x) for x in run(*args)], str(jax.make_jaxpr(run)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_by_the_kernels_has_the_bits_of_the_twins(dtype):
    cfg = THREE.with_overrides(dtype=dtype)
    (hidden, scores), twins = logprobs(cfg, PINNED)
    (hidden2, scores2), kernels = logprobs(cfg, KERNELS)
    for name in ("pinned_matmul_nn", "grouped_matmul_nn", "sparse_attention"):
        assert f"name={name}" in kernels and f"name={name}" not in twins, name
    assert hidden.tobytes() == hidden2.tobytes()
    assert scores.tobytes() == scores2.tobytes() and np.isfinite(scores).all()
