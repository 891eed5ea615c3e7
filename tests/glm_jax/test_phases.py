"""A log-probability is the same 32 bits by prefill and by decode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.forward import arithmetic, forward
from glm_jax.head import score
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from tests.glm_jax.models import THREE

CFG = THREE
IDS = np.random.default_rng(3).integers(0, CFG.vocab_size, 49)


@jax.jit
def step(model, batch, cache, targets_T):
    out = forward(model, batch, cache)
    scores = score(model, arithmetic(cache, None), out.hidden_TD, targets_T, batch.n_used)
    return scores.target_T, out.cache


def logprobs(model, mode, size):
    """Log-probabilities of the sequence, read `size` tokens at a time."""
    cache = LatentCache.empty(model.cfg, 1, 64, contract=NumericsContract(mode=mode))
    parts = []
    for start in range(0, len(IDS) - 1, size):
        batch = TokenBatch.from_sequences(model.cfg, [IDS[start : start + size]], start=[start])
        targets_T = jnp.asarray(IDS[start + 1 : start + size + 1], jnp.int32)
        logprob_T, cache = step(model, batch, cache, targets_T)
        parts.append(np.asarray(logprob_T))
    return np.concatenate(parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_gives_the_bits_of_prefill(dtype):
    model = GlmModel.init(CFG.with_overrides(dtype=dtype))
    whole, one_by_one = (logprobs(model, "pinned", size) for size in (48, 1))
    assert np.array_equal(whole.view(np.uint32), one_by_one.view(np.uint32))


def test_stock_arithmetic_does_not():
    # The control: equality above is the contract's work, not the model's insensitivity.
    model = GlmModel.init(CFG)
    whole, one_by_one = (logprobs(model, "native", size) for size in (48, 1))
    assert not np.array_equal(whole.view(np.uint32), one_by_one.view(np.uint32))
    assert np.allclose(whole, one_by_one, atol=1e-4)
