"""Exact values of expressions, and the shortest expression of a value."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from glm_jax.errors import GlmError
from rl.envs.arithmetic import MOST_DEPTH, evaluate, solve

ALPHABET = "0123456789+-*/()"


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, (7,)),
        ("3*7+12", 33, (3, 7, 12)),
        ("3+7*12", 87, (3, 7, 12)),
        ("8-3-3", 2, (8, 3, 3)),
        ("8/4/2", 1, (8, 4, 2)),
        ("8/(4/2)", 4, (8, 4, 2)),
        ("1/3*3", 1, (1, 3, 3)),
        ("8/(3-8/3)", 24, (8, 3, 8, 3)),
        ("((5))", 5, (5,)),
        ("0*10", 0, (0, 10)),
    ],
)
def test_values_are_exact(text, value, numbers):
    assert evaluate(text) == (Fraction(value), numbers)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "+",
            "3+",
            "+3",
            "-3",
            "3**2",
            "3//2",
            "(3",
            "3)",
            "()",
            "3 +4",
            "=3",
            "3+4=7",
            "3,4",
        ),
        *("03", "1 2", "12(3)", "(1)(2)", "3/0", "3/(2-2)", "\u0663", "3\n", "2e3", "0x1", "3.0"),
        *("<pad>3", "3+4<eos>", "(" * 2000, "(" * (MOST_DEPTH + 1) + "1" + ")" * (MOST_DEPTH + 1)),
    ],
)
def test_anything_but_one_expression_is_none(text):
    assert evaluate(text) is None


def test_evaluation_agrees_with_python_on_every_short_text():
    """All texts of up to four characters, and a sample of longer ones."""
    rng = np.random.default_rng(0)
    short = itertools.chain.from_iterable(
        itertools.product("012+-*/()", repeat=n) for n in range(5)
    )
    long = (rng.choice(list(ALPHABET), rng.integers(5, 12)) for _ in range(5000))
    n_expressions = 0
    for characters in itertools.chain(short, long):
        text = "".join(characters)
        found = evaluate(text)
        assert found == by_python(text), text
        n_expressions += found is not None
    assert n_expressions > 100


def by_python(text):
    """Python's own parser, on texts whose operators it reads as we do."""
    import re

    refused = r"\*\*|//|^[+-]|[-+*/(][+-]|\)\(|[0-9]\(|\)[0-9]|\(\)|\b0[0-9]"
    if re.search(refused, text):
        return None
    numbers = tuple(map(int, re.findall(r"[0-9]+", text)))
    try:
        value = eval(re.sub(r"([0-9]+)", r"Fraction(\1)", text), {"Fraction": Fraction})
    except (SyntaxError, ZeroDivisionError):
        return None
    return (value, numbers) if isinstance(value, Fraction) else None


def every_text(numbers, operators="+-*/"):
    """Texts of all trees over all orders of the numbers, fully in parentheses."""
    if len(numbers) == 1:
        yield str(numbers[0])
        return
    for cut in range(1, len(numbers)):
        for a in every_text(numbers[:cut], operators):
            for b in every_text(numbers[cut:], operators):
                for operator in operators:
                    yield f"({a}{operator}{b})"


@pytest.mark.parametrize("seed", range(3))
def test_the_solver_finds_what_brute_force_finds(seed):
    rng = np.random.default_rng(seed)
    numbers = tuple(map(int, rng.integers(1, 13, 3)))
    texts = {text for order in itertools.permutations(numbers) for text in every_text(order)}
    reachable = {found.value for text in texts if (found := evaluate(text))}
    for target in range(-20, 60):
        solution = solve(numbers, target)
        assert (solution is not None) == (Fraction(target) in reachable)
        if solution is not None:
            value, used = evaluate(solution)
            assert value == target and sorted(used) == sorted(numbers)


def test_solutions_are_the_shortest_and_do_not_depend_on_the_order_of_the_numbers():
    lengths = {}
    for order in itertools.permutations((2, 4, 3)):
        for shape in ("{}{}{}{}{}", "({}{}{}){}{}", "{}{}({}{}{})"):
            for a, b in itertools.product("+-*/", repeat=2):
                text = shape.format(order[0], a, order[1], b, order[2])
                if found := evaluate(text):
                    lengths[found.value] = min(len(text), lengths.get(found.value, 99))
    for value, length in lengths.items():
        if value.denominator == 1:
            found = {solve(order, int(value)) for order in itertools.permutations((2, 4, 3))}
            assert len(found) == 1 and len(found.pop()) == length


def test_only_the_operators_given_are_used():
    assert solve((2, 3, 4), 24) == "2*3*4"
    assert solve((2, 3, 4), 24, "+-") is None
    assert solve((8, 3, 8, 3), 24) == "8/(3-8/3)"


def test_too_many_numbers_are_refused():
    with pytest.raises(GlmError, match="numbers: 7 cannot be searched; give 1 to 6"):
        solve([1] * 7, 7)
