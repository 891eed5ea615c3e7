"""The head: see `OpSuite` for the claims that every operation makes."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from glm_jax.head import score
from glm_jax.numerics.arithmetic import Arithmetic
from pallas_kernels.backend import GPU, INTERPRET, XLA
from pallas_kernels.errors import KernelError
from pallas_kernels.head_logprob import head_logprob, pallas_tpu
from pallas_kernels.head_logprob.shapes import OP
from pallas_kernels.pinned_matmul.order import Order
from tests.glm_jax.models import PINNED, THREE, model_of
from tests.pallas_kernels.op_suite import FEW_ROWS, OpSuite, n_unequal

BACKENDS = pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)


class TestHeadLogprob(OpSuite):
    op = OP
    rows = FEW_ROWS


@BACKENDS
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_scores_have_the_bits_of_the_models_head(dtype, backend, rng):
    model = model_of(THREE.with_overrides(vocab_size=384, dtype=dtype))
    contract = dataclasses.replace(PINNED, vocab_block=256)
    hidden = jnp.asarray(rng.standard_normal((21, THREE.hidden_size)), dtype)
    targets = jnp.asarray(rng.integers(0, 384, 21), jnp.int32)
    run = jax.jit(lambda *a: score(model, Arithmetic(contract), *a, jnp.int32(21), top=4))
    head = jax.jit(lambda *a: head_logprob(*a, top=4, block=256, implementation=backend))
    got = head(hidden, model.lm_head[...], targets)
    assert np.isfinite(got.target_M).all()
    assert n_unequal(got, run(hidden, targets)[:4]) == 0


@BACKENDS
def test_ties_go_to_the_lower_id_across_blocks_and_zeros_are_one_value(backend):
    w = np.full((8, 384), -1.0, np.float32)
    w[:, [3, 200, 300]] = 0.25
    w[:, 7], w[:, 130], w[:, 131] = 0.0, -0.0, 0.0
    targets = jnp.asarray([300, 0, 384, -1], jnp.int32)
    run = jax.jit(lambda *a: head_logprob(*a, top=6, block=256, implementation=backend))
    got = run(jnp.ones((4, 8)), jnp.asarray(w), targets)
    assert got.top_ids_Mn.tolist() == [[3, 200, 300, 7, 130, 131]] * 4
    assert (got.target_M[0] == got.top_logprobs_Mn[0, 2]) and np.isfinite(got.target_M[1])
    assert np.isneginf(got.target_M[2:]).all()


def test_refusals(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    hidden, w, targets = jnp.zeros((2, 16)), jnp.zeros((16, 96)), jnp.zeros(2, jnp.int32)
    with pytest.raises(TypeError, match="hidden is bfloat16, w is float32; cast one"):
        head_logprob(hidden.astype(jnp.bfloat16), w, targets)
    with pytest.raises(KernelError, match="head_logprob: dtype float16; supported are float32"):
        head_logprob(hidden.astype(jnp.float16), w.astype(jnp.float16), targets)
    with pytest.raises(KernelError, match=r"hidden \(2, 16\), w \(96, 16\) \[D, V\] do not fit"):
        head_logprob(hidden, w.T, targets)
    with pytest.raises(KernelError, match=r"targets float32\(2,\): need an integer a row"):
        head_logprob(hidden, w, targets.astype(jnp.float32))
    with pytest.raises(KernelError, match="head_logprob: top 97: must be 0 to 96"):
        head_logprob(hidden, w, targets, top=97)
    with pytest.raises(KernelError, match="vocabulary 96: must be a multiple of 128; nearest is"):
        head_logprob(hidden, w, targets, implementation=INTERPRET)
    with pytest.raises(KernelError, match="head_logprob: forward has no gpu kernel; it has tpu"):
        head_logprob(hidden, w, targets, implementation=GPU)
    with pytest.raises(KernelError, match="head_logprob: gradient: there is none"):
        jax.grad(lambda h: head_logprob(h, w, targets).target_M.sum())(hidden)
    with pytest.raises(KernelError, match=r"need .* MiB of VMEM, over vmem_mib 1; nearest is r"):
        pallas_tpu.score(
            jnp.zeros((64, 1024)),
            jnp.zeros((1024, 512)),
            jnp.zeros((64, 1), jnp.int32),
            top=0,
            block=512,
            order=Order(),
            interpret=True,
            config=pallas_tpu.Config((64,), 1),
        )
