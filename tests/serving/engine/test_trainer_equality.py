"""The trainer's forward gives the log-probabilities that the engine recorded, bit for bit."""

import jax
import numpy as np
import pytest

from glm_jax.head import Shaping
from glm_jax.training import backward, pack
from tests.serving.engine.models import (
    CFG,
    FILTERS,
    KINDS,
    alone,
    bits,
    contract,
    engine,
    model,
    params,
    prompt,
    words,
)

FORWARD = jax.jit(backward.train_forward, static_argnums=2)


def scored(start, completion, temperature=None, dtype="float32"):
    """Log-probabilities of a completion by the trainer: of the model's own distribution, or as it
    was sampled at a temperature."""
    tokens = np.concatenate([start, completion.token_ids])
    drawn = slice(len(start) - 1, len(tokens) - 1)
    shapes = None
    if temperature is not None:
        temperatures = np.ones(len(tokens), np.float32)
        kept = np.full((len(tokens), -(-CFG.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        temperatures[drawn] = temperature
        if completion.kept is not None:
            kept[drawn] = completion.kept
        shapes = [Shaping(temperatures, kept)]
    train, rows = pack.pack(
        CFG, contract(), [tokens], [np.roll(tokens, -1)], n_rows=64, max_length=64, shaping=shapes
    )
    logprob_T, _ = FORWARD(model(dtype), train, contract())
    return np.asarray(logprob_T)[rows[0]][drawn]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_raw_and_sampling_log_probabilities_are_the_trainers(kind, dtype):
    completion = alone(kind, 21, dtype)
    own = scored(prompt(21), completion, dtype=dtype)
    assert words(own) == words(completion.logprobs)
    # A greedy choice is scored at temperature 1.
    shaped = scored(prompt(21), completion, KINDS[kind].temperature or 1.0, dtype)
    assert words(shaped) == words(completion.sampling_logprobs)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.6, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "min_p": 0.1},
        {"min_tokens": 4, "stop_ids": (3, 9, 11)},
    ],
)
def test_each_filter_alone_gives_a_ratio_of_exactly_one(changes):
    completion = engine().generate([prompt(17)], params(**changes))[0][0]
    shaped = scored(prompt(17), completion, changes.get("temperature", 1.0))
    assert words(shaped) == words(completion.sampling_logprobs)
    assert (np.exp(shaped - completion.sampling_logprobs) == 1.0).all()


def test_sampling_differs_from_raw_only_where_the_distribution_does():
    for kind in ("own", "greedy"):
        assert bits(alone(kind, 21))[1] == bits(alone(kind, 21))[2]
    for kind in ("cold", "filtered"):
        assert bits(alone(kind, 21))[1] != bits(alone(kind, 21))[2]


def test_a_kept_set_that_was_lost_is_seen():
    completion = engine().generate([prompt(17)], params(**FILTERS))[0][0]
    assert words(scored(prompt(17), completion)) != words(completion.sampling_logprobs)


def test_prompt_log_probabilities_are_the_trainers_and_change_nothing():
    completion = engine().generate([prompt(21)], params(prompt_logprobs=True))[0][0]
    assert bits(completion) == bits(alone("own", 21))
    tokens = np.asarray(prompt(21))
    train, rows = pack.pack(
        CFG, contract(), [tokens], [np.roll(tokens, -1)], n_rows=64, max_length=64
    )
    logprob_T, _ = FORWARD(model(), train, contract())
    expected = np.asarray(logprob_T)[rows[0]][:-1]
    assert words(completion.prompt_logprobs) == words(expected)
    # Kept pages hold no hidden states: with them the scores would be missing.
    again = engine().generate([prompt(40)] * 2, params(prompt_logprobs=True))
    assert np.isfinite(again[1][0].prompt_logprobs).all()
