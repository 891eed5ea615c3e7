"""The trainer: gradients add up, order and cut do not matter, nothing is lost on a mistake."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.presets import preset
from rl.datum import Datum
from rl.optimizer import AdamParams
from rl.trainer import Trainer, TrainerConfig

CFG = preset("tiny").with_overrides(
    vocab_size=48,
    num_hidden_layers=2,
    index_topk=8,
    first_k_dense_replace=1,
    mlp_layer_types=("dense", "sparse"),
    indexer_types=("full", "shared"),
    num_nextn_predict_layers=0,
)
CONFIG = TrainerConfig(rows_per_batch=64, max_length=32, max_chunks=31)
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=1.0, weight_decay=0.01)


@functools.cache
def contract(mode="pinned"):
    return NumericsContract(mode=mode, token_leaf=16, key_block=16)


@functools.cache
def model(dtype="float32"):
    return GlmModel.init(CFG.with_overrides(dtype=dtype))


def trainer(dtype="float32", mode="pinned"):
    return Trainer(model(dtype), contract=contract(mode), config=CONFIG)


@functools.cache
def data(n=6):
    rng = np.random.default_rng(0)
    out = []
    for length in (20, 7, 31, 12, 20, 3)[:n]:
        tokens = rng.integers(0, CFG.vocab_size, length)
        inputs = {
            "target_tokens": np.roll(tokens, -1),
            "weights": (np.arange(length) > 1) * (np.arange(length) < length - 1),
            "logprobs": rng.normal(-3.8, 0.1, length),
            "advantages": np.full(length, rng.normal()),
        }
        out.append(Datum(tokens, inputs))
    return out


def stepped(batches, loss="ppo", dtype="float32", **more):
    t = trainer(dtype)
    for batch in batches:
        t.forward_backward(batch, loss, **more)
    metrics = t.optim_step(ADAM)
    return t, metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_order_nor_rows_per_batch_changes_a_bit(dtype):
    first, metrics = stepped([data()], dtype=dtype)
    assert metrics["optim/grad_norm"] > 0 and first.version == 1
    again, _ = stepped([data()[::-1]], dtype=dtype)
    assert first.digest() == again.digest()
    if dtype == "float32":
        wide = Trainer(
            model(), contract=contract(), config=TrainerConfig(128, max_length=32, max_chunks=31)
        )
        wide.forward_backward(data(), "ppo")
        wide.optim_step(ADAM)
        assert wide.digest() == first.digest()
        # The control: other data give other weights.
        assert stepped([data(5)])[0].digest() != first.digest()


def test_gradients_accumulate_until_the_step():
    parts = sorted(data(), key=lambda d: d.key())
    two, _ = stepped([parts[:3], parts[3:]])
    assert two.digest() == stepped([data()])[0].digest()
    with pytest.raises(GlmError, match="no gradient has accumulated"):
        two.optim_step(ADAM)


def test_losses_give_the_forwards_log_probabilities_and_the_same_keys():
    expected = trainer().forward(data()).logprobs
    for loss in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"):
        out = trainer().forward_backward(data(), loss)
        assert [set(x) for x in out.loss_fn_outputs] == [{"logprobs"}] * 6
        for a, b in zip(out.logprobs, expected, strict=True):
            assert a.tobytes() == b.tobytes()
    assert out.metrics["ppo/clip_frac"] >= 0


def test_a_custom_loss_gives_the_step_of_the_built_in_one():
    built_in, _ = stepped([data()], "cross_entropy")
    t = trainer()

    def loss(logprobs):
        parts = [
            jnp.sum(jnp.where(d.weights != 0, -x * d.weights, 0.0))
            for x, d in zip(logprobs, data(), strict=True)
        ]
        return functools.reduce(jnp.add, parts), {"n": float(len(parts))}

    out = t.forward_backward_custom(data(), loss)
    t.optim_step(ADAM)
    assert t.digest() == built_in.digest() and out.metrics["n"] == 6.0


def test_a_step_against_the_gradient_lowers_the_loss():
    t = trainer()
    losses = []
    for _ in range(8):
        losses.append(t.forward_backward(data(), "cross_entropy").metrics["loss:sum"])
        t.optim_step(AdamParams(learning_rate=3e-3))
    assert losses[-1] < 0.8 * losses[0]


def test_weights_are_replaced_not_changed():
    t = trainer()
    old, before = t.model, np.asarray(t.model.lm_head[...])
    t.forward_backward(data(), "cross_entropy")
    t.optim_step(ADAM)
    assert np.array_equal(old.lm_head[...], before)
    assert not np.array_equal(t.model.lm_head[...], before)


def test_what_is_not_finite_is_named_and_changes_nothing():
    t = trainer()
    digest = t.digest()
    bad = Datum(data()[0].tokens, data()[0].loss_fn_inputs | {"advantages": np.full(20, np.nan)})
    with pytest.raises(GlmError, match="advantages of token 2 is nan"):
        t.forward_backward([*data(), bad], "ppo")
    with pytest.raises(GlmError, match="no gradient has accumulated"):
        t.optim_step(ADAM)
    huge = Datum(data()[0].tokens, data()[0].loss_fn_inputs | {"weights": np.full(20, 3e38)})
    t.forward_backward([huge, huge], "cross_entropy")
    with pytest.raises(GlmError, match=r"gradient of \S+ \(\d+ arrays\) is not finite"):
        t.optim_step(ADAM)
    assert t.digest() == digest and t.version == 0


def test_a_state_goes_on_to_the_same_weights(tmp_path):
    straight = trainer()
    for _ in range(2):
        straight.forward_backward(data(), "ppo")
        straight.optim_step(ADAM)
    t, _ = stepped([data()])
    t.save_state(tmp_path / "state", {"position": 17})
    other = trainer()
    assert other.load_state(tmp_path / "state") == {"position": 17}
    assert (other.step, other.version, other.digest()) == (1, 1, t.digest())
    other.forward_backward(data(), "ppo")
    other.optim_step(ADAM)
    assert other.digest() == straight.digest()
    for a, b in zip(jax.tree.leaves(other._opt), jax.tree.leaves(straight._opt), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    t, _ = stepped([data()])
    state = t.save_state(tmp_path / "state")
    with pytest.raises(GlmError, match="token_leaf: 32 here, 16 there"):
        Trainer(
            model(), contract=NumericsContract(token_leaf=32, key_block=16), config=CONFIG
        ).load_state(state)
    with pytest.raises(GlmError, match="dtype: bfloat16 here, float32 there"):
        trainer("bfloat16").load_state(state)
    arrays = state / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-100])
    with pytest.raises(GlmError, match="cannot be read"):
        t.load_state(state)
    (state / "state.json").unlink()
    with pytest.raises(GlmError, match=r"has no state\.json"):
        t.load_state(state)


def test_too_many_chunks_and_bad_sizes_are_refused():
    t = trainer()
    with pytest.raises(GlmError, match="max_chunks: more than 31 chunks of 16 tokens"):
        t.forward_backward(data() * 4, "ppo")
    with pytest.raises(GlmError, match="rows_per_batch"):
        TrainerConfig(rows_per_batch=16, max_length=32)
    with pytest.raises(GlmError, match="data: is empty"):
        t.forward_backward([], "ppo")


def test_stock_arithmetic_trains_too():
    t = trainer(mode="native")
    expected = trainer().forward(data()).logprobs
    for a, b in zip(t.forward(data()).logprobs, expected, strict=True):
        assert np.allclose(a, b, atol=1e-4)
    t.forward_backward(data(), "ppo")
    norm = t.optim_step(ADAM)["optim/grad_norm"]
    assert norm == pytest.approx(stepped([data()])[1]["optim/grad_norm"], rel=1e-3)
