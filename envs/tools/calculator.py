"""A calculator as a tool: exact arithmetic, of numbers, + - * / and parentheses only.

Decimals that never end are rounded to twelve digits.
"""

from __future__ import annotations

import ast
import re
from decimal import Decimal, localcontext
from fractions import Fraction

MAX_CHARACTERS = 200
_SIGNS = re.compile(r"[\d\s.+\-*/()]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DIGITS = 12
"""Of a value whose decimals never end."""


def calculate(expression: str) -> str:
    """Compute an arithmetic expression, for example (12.5 + 3) * 4."""
    exact = evaluate(_THOUSANDS.sub("", expression))
    with localcontext(prec=_DIGITS if _repeats(exact.denominator) else 4 * MAX_CHARACTERS):
        value = Decimal(exact.numerator) / Decimal(exact.denominator)
    return f"{value:f}"


def _repeats(denominator: int) -> bool:
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator > 1


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression.

    Raises:
        ValueError: If it is too long, no such expression, or divides by zero.
    """
    if len(expression) > MAX_CHARACTERS or _SIGNS.fullmatch(expression) is None:
        raise ValueError(f"{expression[:MAX_CHARACTERS]!r} is no expression of numbers, + - * / and parentheses")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, expression)
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two: parentheses nested too deeply
        raise ValueError(f"{expression!r} is no expression: {type(error).__name__}") from error
    except ZeroDivisionError:
        raise ValueError(f"{expression!r}: division by zero") from None


def _value(node: ast.AST, expression: str) -> Fraction:
    match node:
        case ast.Constant(int() | float()):
            return Fraction(ast.get_source_segment(expression.strip(), node) or "")  # 0.1 is a tenth
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand, expression)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, expression)
        case ast.BinOp(left, ast.Add(), right):
            return _value(left, expression) + _value(right, expression)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left, expression) - _value(right, expression)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left, expression) * _value(right, expression)
        case ast.BinOp(left, ast.Div(), right):
            return _value(left, expression) / _value(right, expression)
    raise ValueError(f"{expression!r}: only + - * / are known")
