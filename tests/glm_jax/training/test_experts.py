"""The routed experts' backward by itself: leaves of every width, several a sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm_jax.model import GlmModel
from glm_jax.model.moe import Moe
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from glm_jax.numerics.primitives import swiglu
from glm_jax.training import accumulate
from glm_jax.training.experts import experts_vjp
from glm_jax.training.pack import pack
from tests.glm_jax.models import THREE

LENGTHS = (37, 70, 5)
N_ROWS, N_LEAF = 128, 16


@functools.cache
def layer() -> Moe:
    blocks = [b for segment in GlmModel.init(THREE).segments for b in segment.blocks]
    sparse = next(b.feed_forward for b in blocks if isinstance(b.feed_forward, Moe))
    graphdef, state = nnx.split(sparse)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[0], state))


@functools.cache
def data():
    """For each sequence: rows, routes, gates, derivatives. All its tokens go to expert 3."""
    rng, (n_experts, k) = np.random.default_rng(0), (THREE.n_routed_experts, 4)
    sequences = []
    for n in LENGTHS:
        others = [
            rng.permutation([e for e in range(n_experts) if e != 3])[: k - 1] for _ in range(n)
        ]
        ids = np.sort(np.concatenate([np.full((n, 1), 3), others], axis=1), axis=1)
        y, d = rng.standard_normal((2, n, THREE.hidden_size)).astype(np.float32)
        y = y * np.exp2(rng.integers(-6, 6, (n, 1))).astype(np.float32)
        sequences.append((y, ids.astype(np.int32), rng.random((n, k)).astype(np.float32), d))
    return sequences


@functools.partial(jax.jit, static_argnums=0)
def run(contract, state, train, y, ids, gates, d):
    graphdef, _ = nnx.split(layer())
    experts = nnx.merge(graphdef, state)
    assert isinstance(experts, Moe)
    shapes = {
        "gate_up": (THREE.hidden_size, 2 * THREE.moe_intermediate_size),
        "down": (THREE.moe_intermediate_size, THREE.hidden_size),
    }
    counter = accumulate.empty(shapes, 3, 2, (1, THREE.n_routed_experts))
    one = dataclasses.replace(contract, expert_tiles=(contract.backward_expert_tile,))
    d_y, d_gates, counter = experts_vjp(
        experts, Arithmetic(one), train, y, ids, gates, d, counter, jnp.int32(0)
    )
    return d_y, d_gates, {name: x[0] for name, x in accumulate.total(counter).items()}


def gradients(placement=None, n_leaf=N_LEAF):
    """Derivatives of each sequence's rows and gates, and of the weights."""
    contract = NumericsContract(token_leaf=n_leaf, backward_expert_tile=8)
    tokens = [np.zeros(n, np.int64) for n in LENGTHS]
    train, rows = pack(
        THREE,
        contract,
        tokens,
        tokens,
        n_rows=N_ROWS,
        max_length=80,
        placement=placement,
        n_chunks=16,
    )
    arrays = [np.full((N_ROWS, *x.shape[1:]), 1, x.dtype) for x in data()[0]]
    for sequence, row in zip(data(), rows, strict=True):
        for whole, part in zip(arrays, sequence, strict=True):
            whole[row] = part
    _, state = nnx.split(layer())
    d_y, d_gates, weights = jax.device_get(run(contract, state, train, *map(jnp.asarray, arrays)))
    return [d_y[r] for r in rows], [d_gates[r] for r in rows], weights


def test_derivatives_equal_those_of_stock_autodiff_to_rounding():
    experts = layer()
    gate_up, down = experts.gate_up[...], experts.down[...]
    gate_up = gate_up.reshape(gate_up.shape[0], gate_up.shape[1], -1)

    @jax.jit
    def stock(gate_up, down, y, ids, gates, d):
        def loss(gate_up, down, y, gates):
            def one(y, ids, gates):
                pre = jnp.einsum("d,kdg->kg", y, gate_up[ids])
                hidden = swiglu(pre.reshape(pre.shape[0], 2, -1))
                return jnp.einsum("k,kf,kfd->d", gates, hidden, down[ids])

            return jnp.sum(jax.vmap(one)(y, ids, gates) * d)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(gate_up, down, y, gates)

    args = [jnp.concatenate([s[i] for s in data()]) for i in range(4)]
    expected = stock(gate_up, down, *args)
    d_y, d_gates, weights = gradients()
    got = (weights["gate_up"], weights["down"], np.concatenate(d_y), np.concatenate(d_gates))
    for a, b in zip(got, expected, strict=True):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)


def test_no_bit_depends_on_where_sequences_lie_and_leaves_do_change_bits():
    def bits(tree):
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]

    expected = gradients()
    assert bits(gradients((2, 1, 0))) == bits(expected)
    # The control: other leaves are another order.
    other = gradients(n_leaf=32)
    assert bits(other[:2]) == bits(expected[:2])
    assert all(a != b for a, b in zip(bits(other[2]), bits(expected[2]), strict=True))
