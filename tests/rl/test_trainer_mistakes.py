"""What a trainer refuses: the datum and the value are named, and nothing that was there is lost."""

import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.errors import GlmError
from rl.datum import Datum
from rl.optimizer import AdamParams
from rl.trainer import TrainerConfig
from tests.rl.trainers import ADAM, changed, data, hashes, stepped, trainer

GOOD = data()[0]
LONG = np.zeros(33, int)


def one(**inputs):
    return changed(GOOD, **inputs)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (one(advantages=np.full(20, np.nan)), r"data\[6\]: .*advantages of token 2 is nan"),
        (one(logprobs=np.full(20, -1e4)), r"data\[6\]: .*token 2 has the loss -?inf"),
        (Datum(LONG, {"target_tokens": LONG}), r"data\[6\]: has 33 tokens, max_length is 32"),
        (one(target_tokens=np.full(20, 48)), r"data\[6\]: target_tokens has the id 48; .*0 to 47"),
        (Datum([48], {"target_tokens": [0]}), r"data\[6\]: tokens has the id 48"),
        (one(temperature=np.zeros(20)), r"data\[6\]: temperature is not above 0"),
        (one(temperature=np.full(20, np.inf)), r"data\[6\]: temperature is not above 0"),
        (one(kept=np.ones((20, 3), int)), r"data\[6\]: kept has 3 words a token; 48 ids need 2"),
        (one(kept=np.zeros((20, 2), int)), r"data\[6\]: .*logp of token 2 is (-inf|nan)"),
        ({"tokens": [1]}, r"data\[6\]: is a dict; give a Datum"),
    ],
)  # fmt: skip
def test_a_call_that_fails_adds_nothing_and_loses_nothing(bad, message):
    t = trainer()
    t.forward_backward(data(), "importance_sampling")
    with pytest.raises(GlmError, match=message):
        t.forward_backward([*data(), bad], "importance_sampling")
    t.optim_step(ADAM)
    assert hashes(t) == hashes(stepped([data()], "importance_sampling")[0])


def test_a_first_call_that_fails_in_a_later_microbatch_adds_nothing():
    t = trainer()
    last = max(data(), key=lambda d: d.key())
    nan = changed(last, advantages=np.full(len(last.tokens), np.nan))
    with pytest.raises(GlmError, match=r"data\[6\]"):
        t.forward_backward([*data(), nan], "ppo")
    with pytest.raises(GlmError, match="no gradient has accumulated"):
        t.optim_step(ADAM)
    t.forward_backward(data(), "ppo")
    t.optim_step(ADAM)
    assert hashes(t) == hashes(stepped([data()])[0])


def test_a_custom_loss_that_is_not_finite_adds_nothing():
    t = trainer()
    with pytest.raises(GlmError, match="loss: is nan"):
        t.forward_backward_custom(data(), lambda x: (x[0][0] * jnp.nan, {}))
    # Finite itself, but without a derivative at 0.
    with pytest.raises(GlmError, match=r"data\[1\]: the loss has the derivative nan .* token 3"):
        t.forward_backward_custom(data(), lambda x: (jnp.sqrt(x[1][3] * 0), {}))
    with pytest.raises(GlmError, match="no gradient has accumulated"):
        t.optim_step(ADAM)


def huge(scale):
    return [one(weights=np.full(20, scale))]


@pytest.mark.parametrize(
    ("bad", "params", "message"),
    [
        (huge(3e38) * 2, ADAM, r"gradient of \S+ \(\d+ arrays\) is not finite"),
        (huge(1e30), ADAM, r"gradient of \S+ \(\d+ arrays\) is not finite, or too large"),
        (huge(1e30), AdamParams(1e-3), r"gradient of \S+ \(\d+ arrays\) is not finite, or too"),
        (data(), AdamParams(3e38, weight_decay=3e38), r"would leave \S+ .* lower learning_rate"),
    ],
)
def test_a_step_that_would_spoil_the_weights_is_not_taken(bad, params, message):
    t = trainer()
    before = hashes(t)
    t.forward_backward(bad, "cross_entropy")
    with pytest.raises(GlmError, match=message):
        t.optim_step(params)
    assert hashes(t) == before and (t.version, t.step) == (0, 0)
    with pytest.raises(GlmError, match="no gradient has accumulated"):
        t.optim_step(params)


def test_too_many_chunks_in_one_call_or_several_are_refused():
    t = trainer()
    with pytest.raises(GlmError, match=r"max_chunks: 36 chunks of 16 tokens .* room for 31"):
        t.forward_backward(data() * 4, "ppo")
    for _ in range(3):
        t.forward_backward(data(), "ppo")
    with pytest.raises(GlmError, match="max_chunks: 36 chunks"):
        t.forward_backward_custom(data(), lambda x: (x[0][0], {}))


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("rows_per_batch: 16 is less", lambda: TrainerConfig(rows_per_batch=16, max_length=32)),
        ("max_length: 8.5; must be a", lambda: TrainerConfig(max_length=8.5)),
        ("data: is empty", lambda: trainer().forward_backward([], "ppo")),
        ("data: is empty", lambda: trainer().forward([])),
        ("did you mean 'ppo'", lambda: trainer().forward(data(), "pop")),
        ("did you mean 'beta'", lambda: trainer().forward_backward(data(), "dro", {"betta": 1})),
        ("learning_rate: '1e-4'; must be a number", lambda: AdamParams("1e-4")),
        ("learning_rate: nan; must be finite", lambda: AdamParams(float("nan"))),
        ("learning_rate: 1e[+]39; must be finite in f32", lambda: AdamParams(1e39)),
        ("beta1 1.0", lambda: AdamParams(beta1=1.0)),
    ],
)
def test_bad_settings_are_named(message, call):
    with pytest.raises(GlmError, match=message):
        call()


def test_a_schedules_scalars_are_numbers():
    assert AdamParams(jnp.float32(0.5), weight_decay=np.float32(0.25)) == AdamParams(
        0.5, weight_decay=0.25
    )
