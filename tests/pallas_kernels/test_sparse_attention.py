"""Attention over lists: see `OpSuite` for the claims that every operation makes."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from glm_jax.model.attention import attend_gathered
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from pallas_kernels.backend import GPU, INTERPRET, XLA
from pallas_kernels.errors import KernelError
from pallas_kernels.sparse_attention import pallas_tpu, sparse_attention
from pallas_kernels.sparse_attention.shapes import OP, SCALE
from tests.pallas_kernels.op_suite import OpSuite, n_unequal

CASE = OP.tagged("rows")[0].replace(R=9)
BACKENDS = pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)


class TestSparseAttention(OpSuite):
    op = OP


def draw(rng, case=CASE):
    return tuple(jnp.asarray(a) for a in OP.parts[0].arrays(case, rng))


def run(backend, query, keys, listed, rank=CASE["K"]):
    def f(query, keys, listed):
        return sparse_attention(query, keys, listed, scale=SCALE, rank=rank, implementation=backend)

    return jax.jit(f)(query, keys, listed)


@BACKENDS
@pytest.mark.parametrize("case", [c.replace(R=9) for c in OP.tagged("rows")], ids=str)
def test_the_mixture_has_the_bits_of_the_models(case, backend, rng):
    ops, arrays = Arithmetic(NumericsContract()), draw(rng, case)
    model = jax.jit(lambda *a: attend_gathered(ops, *a, scale=SCALE, rank=case["K"]))(*arrays)
    assert n_unequal(run(backend, *arrays), model) == 0


@BACKENDS
def test_what_is_not_listed_may_hold_any_number(backend, rng):
    query, keys, listed = draw(rng)
    other = jnp.where(listed[:, :, None], keys, 1e30)
    assert n_unequal(run(backend, query, other, listed), run(backend, query, keys, listed)) == 0


@BACKENDS
def test_a_token_with_one_key_gets_its_value_and_one_with_none_gets_zeros(backend, rng):
    query, keys, _ = draw(rng)
    one = jnp.zeros(keys.shape[:2], bool).at[:4, 7].set(True)
    mixed = run(backend, query, keys, one)
    value = jnp.broadcast_to(keys[:4, None, 7, : CASE["K"]], mixed[:4].shape)
    assert n_unequal(mixed[:4], value) == 0
    assert not np.asarray(mixed[4:]).any()


def test_the_gradient_is_zero_where_nothing_is_listed_or_used(rng):
    query, keys, listed = draw(rng)
    listed = listed.at[2].set(False)
    mixed, back = jax.vjp(lambda q, k: run(XLA, q, k, listed), query, keys)
    dq, dk = back(jnp.ones_like(mixed))
    assert not np.asarray(dk)[~np.asarray(listed)].any() and not np.asarray(dq)[2].any()
    assert np.asarray(dk)[np.asarray(listed)].any()
    assert not any(np.asarray(x).any() for x in back(jnp.zeros_like(mixed)))


def test_the_length_of_the_list_enters_the_bits(rng):
    # So it is fixed by the config; a shorter list is padded to it, never cut.
    query, keys, listed = draw(rng)
    pad = ((0, 0), (0, 56))
    longer = jnp.pad(keys, (*pad, (0, 0))), jnp.pad(listed, pad)
    assert n_unequal(run(XLA, query, *longer), run(XLA, query, keys, listed)) > 0


def test_refusals(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    query, keys, listed = jnp.zeros((2, 4, 24)), jnp.zeros((2, 16, 24)), jnp.zeros((2, 16), bool)
    with pytest.raises(TypeError, match="query is bfloat16, keys are float32; cast one"):
        run(XLA, query.astype(jnp.bfloat16), keys, listed, 16)
    with pytest.raises(KernelError, match="sparse_attention: dtype float16; supported are"):
        run(XLA, query.astype(jnp.float16), keys.astype(jnp.float16), listed, 16)
    with pytest.raises(KernelError, match=r"keys \(2, 16, 24\), listed \(2, 15\) do not fit"):
        run(XLA, query, keys, listed[:, :15], 16)
    with pytest.raises(KernelError, match=r"query \(1, 4, 24\), keys \(2, 16, 24\)"):
        run(XLA, query[:1], keys, listed, 16)
    with pytest.raises(KernelError, match="sparse_attention: rank 25: must be 1 to 24"):
        run(XLA, query, keys, listed, 25)
    with pytest.raises(KernelError, match="sparse_attention: gradient has no gpu kernel; it has"):
        jax.grad(lambda q: run(GPU, q, keys, listed, 16).sum())(query)
    with pytest.raises(KernelError, match=r"16384 keys needs .* over vmem_mib 8; nearest is \d+ k"):
        pallas_tpu.attend(
            jnp.zeros((1, 8, 64)),
            jnp.zeros((1, 16384, 64)),
            jnp.zeros((1, 16384), bool),
            1.0,
            32,
            True,
            pallas_tpu.Config(8, 8),
        )
