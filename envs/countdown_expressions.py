"""Arithmetic expressions, evaluated exactly and without `eval`: numbers, + - * /, parentheses, a leading minus.

expression = term (('+' | '-') term)*     term = factor (('*' | '/') factor)*
factor = number | '(' expression ')' | '-' factor
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 200
_TOKEN = re.compile(r"\s*(\d+|[-+*/()])")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The exact value of an expression, and the numbers it was made from, left to right."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(expression: str) -> Evaluated:
    """Evaluate an expression.

    Raises:
        ValueError: If it is too long, not an expression, or divides by zero; it says where.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_CHARACTERS} are read")
    parser = _Parser(_tokens(expression))
    value = parser.expression()
    if parser.position < len(parser.tokens):
        raise ValueError(f"{expression!r}: {parser.tokens[parser.position]!r} was not expected")
    return Evaluated(value, tuple(parser.numbers))


def _tokens(expression: str) -> list[str]:
    tokens, position = [], 0
    stripped = expression.rstrip()
    while position < len(stripped):
        match = _TOKEN.match(stripped, position)
        if match is None:
            raise ValueError(f"{expression!r}: {stripped[position]!r} is no number, sign or parenthesis")
        tokens.append(match.group(1))
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent; `MAX_CHARACTERS` bounds its depth."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.numbers: list[int] = []

    def expression(self) -> Fraction:
        value = self._term()
        while (sign := self._take("+", "-")) is not None:
            value = value + self._term() if sign == "+" else value - self._term()
        return value

    def _term(self) -> Fraction:
        value = self._factor()
        while (sign := self._take("*", "/")) is not None:
            right = self._factor()
            if sign == "/" and right == 0:
                raise ValueError("division by zero")
            value = value * right if sign == "*" else value / right
        return value

    def _factor(self) -> Fraction:
        if self._take("-") is not None:
            return -self._factor()
        if self._take("(") is not None:
            value = self.expression()
            if self._take(")") is None:
                raise ValueError("a parenthesis is not closed")
            return value
        if self.position == len(self.tokens) or not self.tokens[self.position].isdecimal():
            found = repr(self.tokens[self.position]) if self.position < len(self.tokens) else "the end"
            raise ValueError(f"a number was expected, not {found}")
        self.numbers.append(int(self.tokens[self.position]))
        self.position += 1
        return Fraction(self.numbers[-1])

    def _take(self, *choices: str) -> str | None:
        if self.position < len(self.tokens) and self.tokens[self.position] in choices:
            self.position += 1
            return self.tokens[self.position - 1]
        return None
