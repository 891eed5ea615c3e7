"""Exclusive or of storage: see `OpSuite` for the claims that every operation makes."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import GPU, INTERPRET, XLA
from pallas_kernels.errors import KernelError
from pallas_kernels.xor_delta import BLOCK, xor_apply, xor_delta
from pallas_kernels.xor_delta.shapes import OP
from tests.pallas_kernels.op_suite import OpSuite, n_unequal


class TestXorDelta(OpSuite):
    op = OP


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_applying_a_delta_gives_the_new_bits(dtype, backend, rng):
    bits = rng.integers(0, 2**16, (2, 3, 1111, 2), dtype=np.uint16)
    old, new = (
        jnp.asarray(x.view(np.float16) if dtype == "float16" else x.astype(np.uint32) * 65539)
        for x in bits
    )
    if dtype != "float16":  # all patterns: NaNs, infinities and denormals among them
        old, new = (x.view(dtype) for x in (old, new))
    delta, changed = xor_delta(old, new, implementation=backend)
    assert n_unequal(xor_apply(old, delta), new) == 0
    assert n_unequal(xor_apply(new, delta), old) == 0
    assert int(changed.sum()) == int((delta != 0).sum()) > 0


def test_equal_arrays_have_an_empty_delta_whatever_they_hold():
    x = jnp.asarray([np.nan, -0.0, 0.0, np.inf] * BLOCK, jnp.bfloat16)
    delta, changed = xor_delta(x, x)
    assert not delta.any() and changed.tolist() == [0, 0, 0, 0]


def test_changes_are_counted_in_their_block():
    old = jnp.zeros(2 * BLOCK + 1)
    delta, changed = xor_delta(old, old.at[jnp.asarray([0, BLOCK, BLOCK + 5, 2 * BLOCK])].set(-0.0))
    assert changed.tolist() == [1, 2, 1]
    assert int((np.asarray(delta) == 2**31).sum()) == 4


def test_refusals():
    x = jnp.zeros((2, 3))
    with pytest.raises(KernelError, match=r"old float32\(2, 3\) and new float32\(3, 2\) must"):
        xor_delta(x, x.T)
    with pytest.raises(KernelError, match=r"and new bfloat16\(2, 3\) must agree"):
        xor_delta(x, x.astype(jnp.bfloat16))
    with pytest.raises(KernelError, match="xor_delta: dtype int32; supported are float32, bf"):
        xor_delta(x.astype(jnp.int32), x.astype(jnp.int32))
    with pytest.raises(KernelError, match="xor_delta: forward has no gpu kernel; it has tpu, xla"):
        xor_delta(x, x, implementation=GPU)
    with pytest.raises(KernelError, match=r"delta uint32\(5,\) does not fit float32\(2, 3\)"):
        xor_apply(x, jnp.zeros(5, jnp.uint32))
