"""RMSNorm: see `OpSuite` for the claims that every operation makes."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from glm_jax.numerics import primitives
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from pallas_kernels import rowwise
from pallas_kernels.backend import GPU, INTERPRET, XLA
from pallas_kernels.cases import spread
from pallas_kernels.errors import KernelError
from pallas_kernels.rms_norm import add_rms_norm, rms_norm
from pallas_kernels.rms_norm.shapes import OP
from tests.pallas_kernels.op_suite import OpSuite, n_unequal

EPS = 1e-5


class TestRmsNorm(OpSuite):
    op = OP


def draw(rng, dtype, m=20, d=136):
    return tuple(jnp.asarray(spread(rng, shape, dtype)) for shape in ((m, d), (m, d), (d,)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_has_the_bits_of_the_models(dtype, rng):
    residual, branch, gain = draw(rng, dtype, 24)
    ops = Arithmetic(NumericsContract())
    model = jax.jit(lambda *a: primitives.add_rms_norm(ops, *a, EPS))(residual, branch, gain)
    for backend in (XLA, INTERPRET):
        f = jax.jit(lambda *a, b=backend: add_rms_norm(*a, eps=EPS, implementation=b))
        assert n_unequal(f(residual, branch, gain), model) == 0
        f = jax.jit(lambda *a, b=backend: rms_norm(*a, eps=EPS, implementation=b))
        model_alone = jax.jit(lambda *a: primitives.rms_norm(ops, *a, EPS))(residual, gain)
        assert n_unequal(f(residual, gain), model_alone) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_have_the_same_bits_in_the_kernel_and_are_right(dtype, rng):
    residual, branch, gain = draw(rng, dtype)
    d_out = draw(rng, dtype)[:2]

    def gradients(backend):
        def pull(*arrays):
            f = lambda *a: add_rms_norm(*a, eps=EPS, implementation=backend)
            return jax.vjp(f, *arrays)[1](d_out)

        return jax.jit(pull)(residual, branch, gain)

    twin = gradients(XLA)
    assert n_unequal(gradients(INTERPRET), twin) == 0
    assert n_unequal(twin[0], twin[1]) == 0

    def plain(residual, branch, gain):
        total = residual + branch
        root = jax.lax.rsqrt(jnp.mean(total**2, axis=1, keepdims=True) + EPS)
        return total * root * gain[None], total

    wide = [a.astype(jnp.float32) for a in (residual, branch, gain)]
    right = jax.vjp(plain, *wide)[1](tuple(d.astype(jnp.float32) for d in d_out))
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}[dtype]
    for got, expected in zip(twin, right, strict=True):
        size = float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=tolerance * size)


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
def test_the_norm_reads_the_unrounded_sum(backend, rng):
    residual, branch, gain = draw(rng, "bfloat16")
    normed, total = add_rms_norm(residual, branch, gain, eps=EPS, implementation=backend)
    rounded = rms_norm(total, gain, eps=EPS, implementation=backend)
    assert n_unequal(normed, rounded) > 0


def test_tiles_of_the_kernel_change_no_bit(rng):
    x, _, gain = draw(rng, "float32", 70)
    from pallas_kernels.rms_norm import xla

    def body(x, gain):
        return xla.norm(x, gain, EPS)

    out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    results = [
        jax.jit(
            lambda x, g, t=tile: rowwise.apply(
                "rms_norm", body, [x], [g[None]], out, INTERPRET, rowwise.Config(t, 32)
            )
        )(x, gain)
        for tile in (16, 48, 128)
    ]
    assert all(n_unequal(result, results[0]) == 0 for result in results)


@pytest.fixture
def without_shape_checks():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("without_shape_checks")
def test_refusals():
    x, gain = jnp.zeros((4, 8)), jnp.zeros(8)
    with pytest.raises(KernelError, match="rms_norm: dtype float16; supported are float32"):
        rms_norm(x.astype(jnp.float16), gain, eps=EPS)
    with pytest.raises(KernelError, match=r"rms_norm: x \(4, 8\) does not fit gain \(9,\)"):
        rms_norm(x, jnp.zeros(9), eps=EPS)
    with pytest.raises(KernelError, match=r"branch bfloat16\(4, 8\) does not fit residual float32"):
        add_rms_norm(x, x.astype(jnp.bfloat16), gain, eps=EPS)
    with pytest.raises(KernelError, match="rms_norm: forward has no gpu kernel; it has tpu, xla"):
        rms_norm(x, gain, eps=EPS, implementation=GPU)
    with pytest.raises(KernelError, match=r"row_tile 512 needs .* of VMEM, over vmem_mib 8; near"):
        rowwise.apply(
            "rms_norm",
            lambda x: (x,),
            [jnp.zeros((512, 4096))],
            [],
            [jax.ShapeDtypeStruct((512, 4096), jnp.float32)],
            INTERPRET,
            rowwise.Config(512, 8),
        )
    with pytest.raises(KernelError, match="row_tile 20: must be a multiple of 16; nearest is 16"):
        rowwise.Config(20, 8)
