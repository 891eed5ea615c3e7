"""Gradients through the one forward: right, and the same bits however the work is cut."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm_jax.batch import TokenBatch
from glm_jax.errors import GlmError
from glm_jax.forward import forward
from glm_jax.head import Shaping
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves
from glm_jax.training import accumulate, backward, pack
from tests.glm_jax.models import THREE

CFG = THREE
LENGTHS = (40, 17, 64, 33)
MAX_LENGTH, N_ROWS = 64, 256
ROOM = (1, 2)
"""Two chunks a sequence, four sequences."""


@functools.cache
def contract():
    return NumericsContract(token_leaf=32)


@functools.cache
def model(dtype="float32"):
    return GlmModel.init(CFG.with_overrides(dtype=dtype))


@functools.cache
def data():
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, CFG.vocab_size, n) for n in LENGTHS]
    coefficients = [rng.standard_normal(n).astype(np.float32) for n in LENGTHS]
    return sequences, [np.roll(x, -1) for x in sequences], coefficients


FORWARD = jax.jit(backward.train_forward, static_argnums=2)
BACKWARD = jax.jit(backward.backward, static_argnums=5)


@functools.cache
def shaping(kept=True, hot=0.6):
    """Temperatures and kept sets of every position; a kept set always holds the target."""
    rng = np.random.default_rng(2)
    shapes = []
    for target in data()[1]:
        n, v = len(target), CFG.vocab_size
        mask = np.ones((n, v), bool) if not kept else rng.random((n, v)) < 0.5
        mask[np.arange(n), target] = True
        words = np.packbits(mask, axis=1, bitorder="little").view(np.uint32)
        temperature = np.full(n, hot, np.float32)
        temperature[::3] = 1.0
        shapes.append(Shaping(temperature, words))
    return shapes


def run(batches, dtype="float32", model_=None, shapes=None, n_rows=N_ROWS, numerics=None):
    """Gradients and logprobs over batches of (sequence numbers, placement)."""
    m, numerics = model_ or model(dtype), numerics or contract()
    sequences, targets, coefficients = data()
    state, logprobs = backward.initial(m, *ROOM), {}
    first = 0
    for numbers, placement in batches:
        train, rows = pack.pack(
            m.cfg,
            numerics,
            [sequences[i] for i in numbers],
            [targets[i] for i in numbers],
            n_rows=n_rows,
            max_length=MAX_LENGTH,
            placement=placement,
            numbers=range(first, first + len(numbers)),
            shaping=None if shapes is None else [shapes[i] for i in numbers],
        )
        first += len(numbers)
        # As many slots and chunks in every batch, so that one program serves all.
        train = dataclasses.replace(train, n_slots=4)
        logprob_T, saved = FORWARD(m, train, numerics)
        d_T = np.zeros(n_rows, np.float32)
        for i, r in zip(numbers, rows, strict=True):
            d_T[r] = coefficients[i]
            logprobs[i] = np.asarray(logprob_T)[r]
        state = BACKWARD(m, train, saved, jnp.asarray(d_T), state, numerics)
    return jax.device_get(backward.gradients(m, state)), logprobs


@functools.cache
def whole(dtype="float32"):
    return run([(range(4), None)], dtype)


def same_bits(a, b):
    return all(np.array_equal(a[k].view(np.uint32), b[k].view(np.uint32)) for k in a)


@pytest.mark.parametrize(
    "shaped",
    [
        # A third of the shaped positions are at temperature 1.
        pytest.param(False, id="own distribution", marks=pytest.mark.slow),
        pytest.param(True, id="shaped"),
    ],
)
def test_gradients_equal_those_of_stock_autodiff_to_rounding(shaped):
    sequences, targets, coefficients = data()
    batch = TokenBatch.from_sequences(CFG, sequences)
    target, coefficient = np.zeros((2, 4, MAX_LENGTH), np.float32)
    for i, n in enumerate(LENGTHS):
        target[i, :n], coefficient[i, :n] = targets[i], coefficients[i]
    target_T = jnp.asarray(target.reshape(-1), jnp.int32)
    shapes = shaping() if shaped else None
    temperature, mask = np.ones((4, MAX_LENGTH)), np.ones((4, MAX_LENGTH, CFG.vocab_size), bool)
    for i, one in enumerate(shapes or []):
        temperature[i, : LENGTHS[i]] = one.temperature_T
        bits = np.unpackbits(one.kept_TW.view(np.uint8), axis=1, bitorder="little")
        mask[i, : LENGTHS[i]] = bits[:, : CFG.vocab_size] == 1
    temperature_T1 = temperature.reshape(-1, 1).astype(np.float32)
    mask_TV = mask.reshape(-1, CFG.vocab_size)
    graphdef, params, rest = nnx.split(model(), nnx.Param, ...)

    @jax.jit
    def gradient(params):
        def loss(params):
            m = nnx.merge(graphdef, params, rest)
            logits_TV = m.logits(forward(m, batch).hidden_TD) / temperature_T1
            logprob_TV = jax.nn.log_softmax(jnp.where(mask_TV, logits_TV, -jnp.inf))
            logprob_T = jnp.take_along_axis(logprob_TV, target_T[:, None], axis=1)[:, 0]
            return jnp.sum(
                jnp.where(coefficient.reshape(-1) != 0, logprob_T * coefficient.reshape(-1), 0.0)
            )

        return jax.grad(loss)(params)

    stock = {path: np.asarray(variable[...]) for path, variable in leaves(gradient(params))}
    ours, _ = run([(range(4), None)], shapes=shapes) if shaped else whole()
    for path, expected in stock.items():
        if "indexer" in path:
            assert not expected.any() and path not in ours
            continue
        error = np.linalg.norm(ours[path] - expected) / np.linalg.norm(expected)
        assert error < 1e-5, (path, error)
    assert set(ours) == {path for path in stock if "indexer" not in path}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "batches",
    [
        pytest.param([(range(4), (2, 0, 3, 1))], id="placement"),
        pytest.param([((0, 1), (1, 0)), ((2, 3), None)], id="two microbatches"),
        pytest.param(
            [((0,), None), ((1,), None), ((2,), None), ((3,), None)],
            id="four microbatches",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_gradient_bit_depends_on_packing_or_microbatches(batches, dtype):
    expected, logprobs = whole(dtype)
    got, again = run(batches, dtype)
    assert same_bits(got, expected)
    for i in logprobs:
        assert np.array_equal(again[i].view(np.uint32), logprobs[i].view(np.uint32))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("n_rows", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_no_gradient_bit_depends_on_the_rows_of_a_batch(n_rows, dtype):
    # The forward runs 128 rows in tiles of 64, N_ROWS in one of 256, 1,024 in one of 1,024.
    batches = [((0, 1), (1, 0)), ((2, 3), None)] if n_rows < N_ROWS else [(range(4), None)]
    expected, logprobs = whole(dtype)
    got, again = run(batches, dtype, n_rows=n_rows)
    assert same_bits(got, expected)
    for i in logprobs:
        assert np.array_equal(again[i].view(np.uint32), logprobs[i].view(np.uint32))


def test_another_tile_of_the_backward_does_change_bits():
    # The control: that is why there is one size.
    numerics = dataclasses.replace(contract(), backward_row_tile=8, backward_expert_tile=8)
    assert not same_bits(run([(range(4), None)], numerics=numerics)[0], whole()[0])


def test_another_order_of_the_sequences_does_change_bits():
    # The control: were the sums insensitive to order, the test above would prove nothing.
    expected, _ = whole()
    got, _ = run([((3, 2), None), ((1, 0), None)])
    assert not same_bits(got, expected)
    for path, value in expected.items():
        assert np.allclose(got[path], value, rtol=1e-3, atol=1e-3 * np.abs(value).max())


def test_temperature_1_and_a_kept_set_of_all_change_no_bit():
    expected, logprobs = whole()
    got, again = run([(range(4), None)], shapes=shaping(kept=False, hot=1.0))
    assert same_bits(got, expected)
    for i in logprobs:
        assert np.array_equal(again[i].view(np.uint32), logprobs[i].view(np.uint32))
    hot, _ = run([(range(4), None)], shapes=shaping(kept=False))
    assert not same_bits(hot, expected)


def test_an_expert_without_tokens_gets_a_gradient_of_exactly_plus_zero():
    # A bias that no score can outweigh sends every token to experts 0 to 3.
    graphdef, state = nnx.split(nnx.clone(model()))
    for path, variable in leaves(state):
        if path.endswith("router_bias"):
            bias = np.zeros(variable.shape, np.float32)
            bias[..., :4] = 50.0
            variable.set_value(jnp.asarray(bias))
    got, _ = run([(range(4), None)], model_=nnx.merge(graphdef, state))
    for path, value in got.items():
        if path.endswith(("feed_forward.gate_up", "feed_forward.down")) and value.shape[1] == 16:
            unused = value[:, 4:]
            assert not unused.view(np.uint32).any(), path
            assert value[:, :4].any()


def test_rows_of_other_sequences_and_padding_do_not_reach_a_gradient():
    sequences, targets, coefficients = data()
    alone, _ = run([((2,), None)])
    train, rows = pack.pack(
        CFG, contract(), [sequences[2], sequences[0]], [targets[2], targets[0]],
        n_rows=N_ROWS, max_length=MAX_LENGTH, placement=(1, 0),
    )  # fmt: skip
    train = dataclasses.replace(train, n_slots=4)
    # Only the first sequence's chunks are walked; the neighbour stands in the rows before it.
    train = dataclasses.replace(train, n_chunks=jnp.asarray(2, jnp.int32))
    _, saved = FORWARD(model(), train, contract())
    d_T = np.full(N_ROWS, np.nan, np.float32)
    d_T[rows[0]] = coefficients[2]
    state = BACKWARD(
        model(), train, saved, jnp.asarray(d_T), backward.initial(model(), *ROOM), contract()
    )
    assert same_bits(jax.device_get(backward.gradients(model(), state)), alone)


PUSH = jax.jit(accumulate.push)


def counted(leaves, indices, room=(3, 3)):
    """Sum of the leaves of some indices, and whether there are any."""
    counter = accumulate.empty({"w": (5,)}, *room)
    for i in indices:
        counter = PUSH(counter, jnp.int32(i), {"w": leaves[i]})
    value, some = accumulate.partial(counter)
    return np.asarray(value["w"]), bool(some), np.asarray(accumulate.total(counter)["w"])


def sparse_tree(leaves, low, size):
    """The definition: what is absent adds no node; the earlier half is the left operand."""
    if size == 1:
        return leaves.get(low)
    left = sparse_tree(leaves, low, size // 2)
    right = sparse_tree(leaves, low + size // 2, size // 2)
    if left is None or right is None:
        return right if left is None else left
    return left + right


def sparse(seed, density):
    """Leaves of some chunks (up to 8) of some sequences (up to 8), of very different sizes."""
    rng = np.random.default_rng(seed)
    every = [(s << accumulate.CHUNK_BITS) + c for s in range(8) for c in range(8)]
    indices = [i for i in every if rng.random() < density]
    return {
        i: (rng.standard_normal(5) * np.exp2(rng.integers(-12, 12, 5))).astype(np.float32)
        for i in indices
    }


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_the_counter_adds_like_the_sparse_tree(density):
    leaves = sparse(1, density)
    value, some, total = counted(leaves, leaves)
    expected = sparse_tree(leaves, 0, 8 << accumulate.CHUNK_BITS)
    assert some and value.tobytes() == expected.tobytes() == total.tobytes()
    if density == 1.0:  # the control
        chain = np.add.accumulate(list(leaves.values()), axis=0, dtype=np.float32)[-1]
        assert not np.array_equal(chain, expected)


@pytest.mark.parametrize("size", [1 << 12, 1 << 13, 4 << 13])
def test_aligned_ranges_join_to_the_bits_of_one_counter(size):
    # Every second range of 2^12 is empty: its partial is the identity.
    leaves = sparse(2, 0.5)
    whole = counted(leaves, leaves)[0]

    def of(mine):
        return counted(leaves, [i for i in leaves if mine(i)])[0]

    def join(low, n):
        if n == size:
            return of(lambda i: low <= i < low + n)
        return join(low, n // 2) + join(low + n // 2, n // 2)

    assert join(0, 8 << 13).tobytes() == whole.tobytes()
    # The control: two parts that are cut elsewhere.
    cut = (3 << 13) + 3
    assert (of(lambda i: i < cut) + of(lambda i: i >= cut)).tobytes() != whole.tobytes()


def test_nothing_is_the_identity_and_totals_plus_zero():
    value, some, total = counted({}, [])
    assert not some and np.signbit(value).all() and not total.view(np.uint32).any()
    for x in (np.float32(0.0), np.float32(-0.0), np.float32(3.5)):
        leaf = {9: np.full(5, x)}
        assert (counted(leaf, leaf)[0] + value).tobytes() == leaf[9].tobytes()
        assert (value + counted(leaf, leaf)[0]).tobytes() == leaf[9].tobytes()


def test_pack_refuses_what_does_not_fit():
    sequences, targets, _ = data()
    sizes = {"n_rows": N_ROWS, "max_length": MAX_LENGTH}
    for message, args in {
        "need one target": ([], [], sizes),
        "raise it": (sequences, targets, sizes | {"max_length": 63}),
        "use more batches": (sequences, targets, sizes | {"n_rows": 128}),
        "no permutation": (sequences, targets, sizes | {"placement": [0, 0, 1, 2]}),
        "numbers: .* ascending": (sequences, targets, sizes | {"numbers": [0, 2, 1, 3]}),
        "give one a token": (sequences, targets[1:] + targets[:1], sizes),
        "ids must be 0 to 159": (sequences, [t + 100 for t in targets], sizes),
        "needs 40 temperatures above 0": (
            sequences,
            targets,
            sizes | {"shaping": [Shaping(np.zeros(40, np.float32))] * 4},
        ),
        "for all sequences or for none": (
            sequences,
            targets,
            sizes | {"shaping": [*shaping()[:3], Shaping(np.ones(33, np.float32))]},
        ),
    }.items():
        with pytest.raises(GlmError, match=message):
            pack.pack(CFG, contract(), args[0], args[1], **args[2])
