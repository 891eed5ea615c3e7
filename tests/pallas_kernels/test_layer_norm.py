"""LayerNorm: see `OpSuite` for the claims that every operation makes."""

import jax
import jax.numpy as jnp
import pytest

from glm_jax.numerics import primitives
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from pallas_kernels.backend import GPU, INTERPRET, XLA
from pallas_kernels.cases import spread
from pallas_kernels.errors import KernelError
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.layer_norm.shapes import OP
from tests.pallas_kernels.op_suite import OpSuite, n_unequal

EPS = 1e-6


class TestLayerNorm(OpSuite):
    op = OP


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_has_the_bits_of_the_models(dtype, rng):
    x, gain, bias = (jnp.asarray(spread(rng, s, dtype)) for s in ((24, 128), (128,), (128,)))
    ops = Arithmetic(NumericsContract())
    model = jax.jit(lambda *a: primitives.layer_norm(ops, *a, EPS))(x, gain, bias)
    for backend in (XLA, INTERPRET):
        f = jax.jit(lambda *a, b=backend: layer_norm(*a, eps=EPS, implementation=b))
        assert n_unequal(f(x, gain, bias), model) == 0


def test_the_gradient_of_an_unused_result_is_zero_and_of_the_operation_is_its_part(rng):
    x, gain, dy = (jnp.asarray(spread(rng, s, "float32")) for s in ((9, 40), (40,), (9, 40)))
    _, back = jax.vjp(lambda *a: layer_norm(*a, eps=EPS), x, gain, gain)
    assert all(not d.any() for d in back(jnp.zeros_like(dy)))
    part = OP.parts[1].run(OP.tagged("rows")[0].replace(M=9, D=40), XLA)
    assert n_unequal(back(dy), part(x, dy, gain)) == 0


def test_refusals():
    x, gain = jnp.zeros((4, 8)), jnp.zeros(8)
    with pytest.raises(KernelError, match="layer_norm: dtype float16; supported are float32"):
        layer_norm(x.astype(jnp.float16), gain, gain, eps=EPS)
    with pytest.raises(KernelError, match="layer_norm: forward has no gpu kernel; it has tpu, xla"):
        layer_norm(x, gain, gain, eps=EPS, implementation=GPU)
