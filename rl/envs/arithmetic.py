"""Arithmetic expressions: exact values of texts, and the shortest text that reaches a value."""

import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from glm_jax.errors import GlmError

MOST_DEPTH = 32
"""Nested parentheses; sampled text may open any number."""

MOST_NUMBERS = 6
"""Numbers that `solve` searches; each more takes some fifty times as long."""

OPERATORS = "+-*/"

_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}

_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*/()]")


class Value(NamedTuple):
    """What an expression is worth and which numbers it was made of."""

    value: Fraction
    numbers: tuple[int, ...]
    """In the order of the text."""


def evaluate(text: str) -> Value | None:
    """The exact value of a text that is an expression and nothing else; else None.

    Numbers are whole, without sign or leading zeros; operators are + - * / with the usual
    precedence, left to right. Spaces, other characters, a division by zero, and text before or
    after the expression make it none.
    """
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        return None
    parser = _Parser(tokens)
    try:
        value = parser.sum(0)
    except (_MalformedError, ZeroDivisionError):
        return None
    return Value(value, tuple(parser.numbers)) if parser.at == len(tokens) else None


class _MalformedError(Exception):
    pass


class _Parser:
    """Recursive descent: a sum of products of atoms."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.at, self.numbers = tokens, 0, []

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while (sign := self.peek()) in ("+", "-"):
            self.at += 1
            value = _APPLY[sign](value, self.product(depth))
        return value

    def product(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while (sign := self.peek()) in ("*", "/"):
            self.at += 1
            value = _APPLY[sign](value, self.atom(depth))
        return value

    def atom(self, depth: int) -> Fraction:
        token = self.peek()
        self.at += 1
        if token == "(" and depth < MOST_DEPTH:
            value = self.sum(depth + 1)
            if self.peek() != ")":
                raise _MalformedError
            self.at += 1
            return value
        if not token.isdigit():
            raise _MalformedError
        self.numbers.append(int(token))
        return Fraction(int(token))

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""


_SUM, _PRODUCT, _ATOM = range(3)
"""How tightly an expression's outermost operator binds."""

type _Reached = dict[tuple[Fraction, int], str]
"""Best text by value and binding: a longer text may save parentheses further out."""


def solve(numbers: Sequence[int], target: int, operators: str = OPERATORS) -> str | None:
    """The shortest expression of this value that uses each number once; None if there is none.

    Among equally short ones the first in alphabetical order, so that the answer is a function of
    the problem and the order of `numbers` does not matter.

    Raises:
        GlmError: more numbers than can be searched, or none.
    """
    if not 0 < len(numbers) <= MOST_NUMBERS:
        raise GlmError(f"numbers: {len(numbers)} cannot be searched; give 1 to {MOST_NUMBERS}")
    reached: dict[int, _Reached] = {}  # by set of numbers, as bits
    whole = (1 << len(numbers)) - 1
    for subset in range(1, whole + 1):
        found: _Reached = {}
        if subset.bit_count() == 1:
            number = numbers[subset.bit_length() - 1]
            found[Fraction(number), _ATOM] = str(number)
        left = (subset - 1) & subset
        while left:
            _join(found, reached[left], reached[subset ^ left], operators)
            left = (left - 1) & subset
        reached[subset] = found
    texts = [text for (value, _), text in reached[whole].items() if value == target]
    return min(texts, key=_rank, default=None)


def _rank(text: str) -> tuple[int, str]:
    return len(text), text


def _join(found: _Reached, first: _Reached, second: _Reached, signs: str) -> None:
    """Adds every `first sign second`; the other order comes with the subsets swapped."""
    for (a, a_binding), a_text in first.items():
        for (b, b_binding), b_text in second.items():
            for sign in signs:
                if sign == "/" and b == 0:
                    continue
                binding = _SUM if sign in "+-" else _PRODUCT
                left = a_text if a_binding >= binding else f"({a_text})"
                # a - (b + c) and a / (b * c) need the parentheses that a + b + c does not.
                enough = b_binding >= binding + (sign in "-/")
                text = f"{left}{sign}{b_text if enough else f'({b_text})'}"
                key = _APPLY[sign](a, b), binding
                if key not in found or _rank(text) < _rank(found[key]):
                    found[key] = text
