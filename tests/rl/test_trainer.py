"""The trainer: gradients add up, order and cut do not matter, nothing is lost on a mistake."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.params import leaves
from rl import trainer_programs
from rl.losses import LOSSES
from rl.optimizer import AdamParams
from rl.trainer import Trainer, TrainerConfig
from tests.rl.trainers import (
    ADAM,
    CFG,
    changed,
    contract,
    data,
    hashes,
    model,
    stepped,
    trainer,
)


# Bits are those of masters and both moments: Adam's first step alone is little more than a sign.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_order_nor_rows_per_batch_changes_a_bit(dtype):
    first, metrics = stepped([data()], dtype=dtype)
    assert metrics["optim/grad_norm"] > 0 and first.version == 1
    again, _ = stepped([data()[::-1]], dtype=dtype)
    assert hashes(first) == hashes(again) and first.digest() == again.digest()
    if dtype == "float32":
        wide = Trainer(
            model(), contract=contract(), config=TrainerConfig(128, max_length=32, max_chunks=31)
        )
        wide.forward_backward(data(), "ppo")
        wide.optim_step(ADAM)
        assert hashes(wide) == hashes(first)
        # The control: other data give other bits in every array that a token reaches.
        other = stepped([data(5)])[0]
        assert hashes(other) != hashes(first) and other.digest() != first.digest()


@pytest.mark.parametrize("cuts", [[[0, 1, 2], [3, 4, 5]], [[5], [2, 0], [1], [4, 3]]])
def test_gradients_accumulate_to_the_bits_of_one_call(cuts):
    parts, _ = stepped([[data()[i] for i in cut] for cut in cuts])
    assert hashes(parts) == hashes(stepped([data()])[0])
    with pytest.raises(GlmError, match="no gradient has accumulated"):
        parts.optim_step(ADAM)


def test_calls_of_different_losses_add_up_in_any_order():
    def one(calls):
        t = trainer()
        for call in calls:
            call(t)
        t.optim_step(ADAM)
        return hashes(t)

    calls = [
        lambda t: t.forward_backward(data(3), "ppo"),
        lambda t: t.forward_backward(data(3), "cross_entropy"),
        lambda t: t.forward_backward_custom(data(2), lambda x: (jnp.sum(x[0] ** 2), {})),
    ]
    assert one(calls) == one(calls[::-1]) != one(calls[:2])


def test_losses_give_the_forwards_log_probabilities_and_the_same_keys():
    expected = trainer().forward(data()).logprobs
    for loss in LOSSES:
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


def test_stock_arithmetic_trains_too():
    t = trainer(mode="native")
    expected = trainer().forward(data()).logprobs
    for a, b in zip(t.forward(data()).logprobs, expected, strict=True):
        assert np.allclose(a, b, atol=1e-4)
    t.forward_backward(data(), "ppo")
    norm = t.optim_step(ADAM)["optim/grad_norm"]
    assert norm == pytest.approx(stepped([data()])[1]["optim/grad_norm"], rel=1e-3)


def test_equal_bits_of_the_sampler_give_ratios_of_exactly_one():
    t = trainer()
    on_policy = [
        changed(d, logprobs=x) for d, x in zip(data(), t.forward(data()).logprobs, strict=True)
    ]
    metrics = t.forward_backward(on_policy, "ppo").metrics
    assert (metrics["ppo/ratio_mean"], metrics["ppo/ratio_max"]) == (1.0, 1.0)
    assert metrics["ppo/clip_frac"] == 0.0
    t.optim_step(ADAM)  # the control: the weights have moved
    assert t.forward(on_policy, "ppo").metrics["ppo/ratio_max"] > 1.0


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "gspo"])
def test_the_gradient_is_the_slope_of_the_loss(loss):
    near = [
        changed(d, logprobs=x + 0.05)
        for d, x in zip(data(), trainer().forward(data()).logprobs, strict=True)
    ]
    t = trainer()
    t.forward_backward(near, loss)
    gradients = t._programs.gradients(t._sum)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in gradients.values()))

    def at(distance):
        moved = trainer()
        step = {p: x + distance / norm * gradients[p] for p, x in moved._opt.masters.items()}
        moved._take(moved._opt._replace(masters=step))
        return moved.forward(near, loss).metrics["loss:sum"]

    # A short way, lest a key or an expert be chosen anew on it: the loss jumps there.
    assert (at(1e-4) - at(-1e-4)) / 2e-4 == pytest.approx(norm, rel=0.01)


def test_what_does_not_count_does_not_matter_even_if_it_is_nan():
    dirty = []
    for datum in data():
        ignored, n = datum.weights == 0, len(datum.tokens)
        names = ("logprobs", "advantages", "ref_logprobs")
        noise = {x: np.where(ignored, np.nan, datum.loss_fn_inputs.get(x, 0)) for x in names}
        noise["temperature"] = np.where(ignored, np.nan, 1)
        noise["kept"] = np.where(ignored[:, None], 0, np.full((n, 2), 2**32 - 1))
        noise["target_tokens"] = np.where(ignored, 0, datum.targets)
        dirty.append(changed(datum, **noise))
    assert hashes(stepped([dirty])[0]) == hashes(stepped([data()])[0])


def test_only_what_is_trained_changes():
    t, _ = stepped([data()], "cross_entropy")
    before = dict(leaves(model()))
    same = {p for p, x in leaves(t.model) if np.array_equal(x[...], before[p][...])}
    frozen = {p for p in before if ".indexer." in p or p.endswith("router_bias")}
    assert same == frozen == set(t._frozen()) and frozen
    drafts = GlmModel.init(CFG.with_overrides(num_nextn_predict_layers=1))
    more = {p for p, _ in leaves(drafts)} - before.keys()
    assert more and set(Trainer(drafts)._frozen()) == frozen | more


def test_one_program_serves_every_batch():
    t = trainer()
    t.forward_backward(data(), "ppo")
    programs = (trainer_programs._forward, trainer_programs._backward)
    before = [program._cache_size() for program in programs]
    for n in (1, 3, 5):
        t.forward_backward(data(n), "ppo")
        t.forward(data(n) * 7)
        t.optim_step(ADAM)
    assert [program._cache_size() for program in programs] == before
