"""Countdown: problems, the checker and its rewards."""

import numpy as np
import pytest

from glm_jax.errors import GlmError
from rl.envs.countdown import Countdown, Problem, check_answer

ENVIRONMENT = Countdown(numbers=3, largest=12, largest_target=40, partial=0.25)
PROBLEM = Problem((3, 7, 12), 33)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3*7+12", (True, True, True)),
        ("12+7*3", (True, True, True)),
        ("12/3+7", (True, True, False)),
        ("12/7*3", (True, True, False)),
        ("33", (True, False, False)),
        ("3*7+12+7-7", (True, False, False)),
        ("3*12-3", (True, False, False)),
        ("12+21", (True, False, False)),
        ("3*7+12=33", (False, False, False)),
        (" 3*7+12", (False, False, False)),
        ("so 3*7+12", (False, False, False)),
        ("12/(7-7)", (False, False, False)),
        ("", (False, False, False)),
    ],
)
def test_an_answer_is_correct_only_if_it_uses_each_number_once_and_reaches_the_target(
    text, expected
):
    assert check_answer(PROBLEM, text) == expected


def test_near_misses_are_not_rounded_to_correct():
    # 10 / 3 * 3 is 10.000000000000002 or 10.0 in floats, by order.
    assert check_answer(Problem((10, 3, 3), 10), "10/3*3").correct
    assert not check_answer(Problem((49, 49, 1, 1), 1), "1/49*49-1+1").right_numbers
    assert check_answer(Problem((1, 49, 49), 1), "1/49*49").correct


def answer(ids, problem=PROBLEM):
    episode = ENVIRONMENT.episode("train", 0)
    return type(episode)(ENVIRONMENT, problem).step(np.asarray(ids, np.int32))


def encode(text):
    return ENVIRONMENT.tokenizer.encode(text)


def test_rewards_are_one_partial_or_nothing_and_the_episode_is_over():
    for text, reward in (("3*7+12<eos>", 1.0), ("3+7+12<eos>", 0.25), ("33<eos>", 0.0)):
        found = answer(encode(text))
        assert (found.reward, found.done) == (reward, True)
    assert answer(encode("3*7+12<eos>")).metrics == {
        "well_formed": 1.0,
        "right_numbers": 1.0,
        "correct": 1.0,
    }


@pytest.mark.parametrize("text", ["3*7+12", "", "<eos>", "3*7<pad>+12<eos>", "<bos>3*7+12<eos>"])
def test_cut_answers_and_hidden_special_tokens_are_wrong(text):
    assert answer(encode(text)).reward == 0.0


def test_problems_are_functions_of_seed_split_and_index():
    again = Countdown(numbers=3, largest=12, largest_target=40, partial=0.25)
    other = Countdown(numbers=3, largest=12, largest_target=40, seed=1)
    for index in (0, 1, 12345):
        for split in ("train", "eval"):
            assert ENVIRONMENT.problem(split, index) == again.problem(split, index)
        assert ENVIRONMENT.problem("eval", index) == other.problem("eval", index)
    train = [[e.problem("train", i) for i in range(20)] for e in (ENVIRONMENT, other)]
    assert train[0] != train[1]


def test_no_problem_is_in_both_splits_in_any_order_of_its_numbers():
    def seen(split):
        problems = [ENVIRONMENT.problem(split, i) for i in range(1500)]
        return {(tuple(sorted(p.numbers)), p.target) for p in problems}

    train, held_out = seen("train"), seen("eval")
    assert len(train) > 500 and len(held_out) > 100
    assert not train & held_out
    assert Problem((3, 7, 12), 33).split == Problem((12, 3, 7), 33).split


def test_demonstrations_are_correct_and_fit_their_bounds():
    for settings in ({}, {"numbers": 4, "largest": 20}, {"numbers": 2, "operators": "+-"}):
        environment = Countdown(**settings)
        for index in range(20):
            prompt, shown = environment.demonstration(index)
            assert environment.episode("train", index).step(np.asarray(shown)).reward == 1.0
            assert list(prompt) == list(environment.episode("train", index).prompt)
            assert len(prompt) <= environment.longest_prompt
            assert len(shown) <= environment.longest_answer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"numbers": 1}, "numbers: 1; must be 2 to 6"),
        ({"largest": 0}, "largest: 0; must be at least 1"),
        ({"operators": "+x"}, "operators: '\\+x'; give some of"),
        ({"operators": ""}, "operators: ''"),
        ({"partial": 1.0}, "partial: 1.0; must be at least 0 and below 1"),
        ({"operators": "+", "numbers": 6, "largest_target": 5}, "largest_target: no train problem"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, message):
    with pytest.raises(GlmError, match=message):
        Countdown(**settings)
