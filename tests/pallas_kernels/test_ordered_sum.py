"""The sum of leaves: see `OpSuite` for the claims that every operation makes."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from pallas_kernels.backend import GPU, INTERPRET, XLA
from pallas_kernels.cases import spread
from pallas_kernels.errors import KernelError
from pallas_kernels.ordered_sum import ordered_sum, pallas_tpu
from pallas_kernels.ordered_sum.shapes import OP
from pallas_kernels.tree import tree_sum
from tests.pallas_kernels.op_suite import OpSuite, n_unequal


class TestOrderedSum(OpSuite):
    op = OP


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
def test_it_is_the_tree_that_gradients_and_leaves_are_added_in(backend, rng):
    leaves = jnp.asarray(spread(rng, (6, 9, 40), "float32"))
    got = ordered_sum(leaves, implementation=backend)
    assert n_unequal(got, tree_sum(list(leaves))) == 0
    turned = ordered_sum(leaves[jnp.asarray([0, 2, 1, 3, 4, 5])], implementation=backend)
    assert n_unequal(got, turned) > 0


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
def test_bf16_leaves_are_added_in_f32_and_rounded_once(backend):
    leaves = jnp.asarray([1.0, 2.0**-8, 2.0**-8], jnp.bfloat16).reshape(3, 1, 1)
    assert float(ordered_sum(leaves, implementation=backend)[0, 0]) == 1 + 2.0**-7


def test_the_gradient_of_every_leaf_is_that_of_the_sum(rng):
    leaves, d = (jnp.asarray(spread(rng, s, "bfloat16")) for s in ((3, 5, 8), (5, 8)))
    (d_leaves,) = jax.vjp(ordered_sum, leaves)[1](d)
    assert all(n_unequal(leaf, d) == 0 for leaf in d_leaves)


def test_refusals(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(KernelError, match="ordered_sum: dtype int32; supported are float32"):
        ordered_sum(jnp.zeros((2, 3, 4), jnp.int32))
    with pytest.raises(KernelError, match=r"leaves \(0, 3, 4\); need \[G, M, D\] with G >= 1"):
        ordered_sum(jnp.zeros((0, 3, 4)))
    with pytest.raises(KernelError, match=r"leaves \(3, 4\); need \[G, M, D\]"):
        ordered_sum(jnp.zeros((3, 4)))
    with pytest.raises(KernelError, match="ordered_sum: forward has no gpu kernel; it has tpu"):
        ordered_sum(jnp.zeros((2, 3, 4)), implementation=GPU)
    with pytest.raises(KernelError, match=r"64 leaves need .* vmem_mib 1; nearest is 10 leaves"):
        pallas_tpu.total(jnp.zeros((64, 16, 512)), True, pallas_tpu.Config(16, 512, 1))
