"""What only a device can show of its kernels: `-m device`, on a machine that has one."""

import jax
import numpy as np
import pytest

from pallas_kernels.backend import GPU, TPU
from pallas_kernels.registry import OPS
from tests.pallas_kernels.op_suite import OpSuite, n_unequal

BACKENDS = {"gpu": GPU, "tpu": TPU}
ROWS = (1, 2, 3, 17, 33, 64, 100, 257)

pytestmark = pytest.mark.device


@pytest.fixture
def backend():
    platform = jax.default_backend()
    if platform not in BACKENDS:
        pytest.skip(f"the platform is {platform}")
    return BACKENDS[platform]


def parts(tag):
    return [
        pytest.param(part, shape, id=f"{name}-{part.name}-{shape}")
        for name, op in OPS.items()
        for part in op.parts
        for shape in op.tagged(tag)
    ]


@pytest.mark.parametrize(("part", "shape"), parts("test"))
def test_a_kernel_is_within_its_bound_and_twice_the_same(part, shape, backend, rng):
    if backend.kind not in part.kinds:
        pytest.skip(f"no {backend.kind} kernel")
    arrays = part.arrays(shape, rng)
    f = jax.jit(part.run(shape, backend))
    got = f(*arrays)
    assert n_unequal(got, f(*arrays)) == 0
    wide = [np.asarray(a, np.float64) if a.dtype.kind not in "iub" else a for a in arrays]
    right = part.reference(shape, *wide)
    for value, (expected, bound) in zip(jax.tree.leaves(got), right, strict=True):
        assert (np.abs(np.asarray(value, np.float64) - expected) <= bound).all()


@pytest.mark.parametrize(("part", "shape"), parts("rows"))
def test_a_row_has_the_bits_it_has_alone(part, shape, backend, rng):
    OpSuite().check_rows(part, shape, backend, ROWS, rng)
