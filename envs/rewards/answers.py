"""The comparison of a response with the answer of a row: rows hold text, numbers and lists, and a response is text.

| answer | equal to the text |
|---|---|
| text | if they are the same, without white space around them; a line may end with `\r\n` or `\n` |
| text of a number with a decimal point, "3.0" | as a number: tables write whole numbers so if their column has gaps |
| int, Decimal | if it is a number of the same value: 3 equals "3", "3.0" and "3e0" |
| float | if it is the number that Python writes for it, "0.1" or "0.10", or is read as it |
| bool | "True" or "true", "False" or "false"; never a number |
| list | if it is a list of equal values in the same order, in JSON or as Python writes it; not one of its values |
| nothing, empty text, NaN (also as text: tables write gaps so), infinity, other types | refused: each would score 0 |
"""

from __future__ import annotations

import ast
import json
import re
from decimal import Decimal, InvalidOperation
from functools import partial
from math import isfinite
from numbers import Integral, Rational, Real
from typing import Any

AnswerValue = str | bool | int | float | Decimal | list[Any]
"""What a row may hold as its answer: JSON types, and exact numbers of tables."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_MAX_LIST_CHARACTERS = 20_000
_MAX_LONGER = 8
"""Characters of a response for each of its list, if it is longer than that: escapes and white space take some."""
NO_ANSWER = "no answer"
_GAPS = ("", "nan", "NaN")


def equals_answer(text: str, answer: AnswerValue) -> bool:
    """Whether the text of a response is the answer of a row, by the table above.

    Args:
        text: What the response gives as its answer.
        answer: Value of the row.

    Raises:
        ValueError: If the answer cannot be compared, with the type.
    """
    plain, text = checked_answer(answer), _with_line_feeds(text.strip())
    if isinstance(plain, list):
        found = _list(text, plain)
        return found is not None and _are_equal(found, plain)
    if isinstance(plain, str):
        own = _with_line_feeds(plain.strip())
        is_number = "." in own and _number(own) is not None
        return text == own or (is_number and _number(text) == _number(own))
    if isinstance(plain, bool):
        return text in (str(plain), str(plain).lower())
    number = _number(text)
    return number is not None and _are_equal(number, plain)


def last_field(response: str, answer: AnswerValue) -> str:
    """The text after the last `;` of a response; of an answer with n of them itself, the last n + 1 fields."""

    def count(value: object) -> int:
        if isinstance(value, list):
            return sum(map(count, value))
        return value.count(";") if isinstance(value, str) else 0

    num_fields = 1 + count(checked_answer(answer))
    return ";".join(response.rsplit(";", num_fields)[-num_fields:])


def checked_answer(answer: object) -> AnswerValue:
    """The answer as plain types; scalars and arrays of numpy become numbers and lists.

    Raises:
        ValueError: If no response could equal it, with the type.
    """
    value = _without_numpy(answer)
    if isinstance(value, list | tuple):
        return [one if one is None or one == "" else checked_answer(one) for one in value]
    plain = _scalar(value)
    if plain is None:
        # One line, also of a long text or table.
        shown = " ".join(f"{value!r:.200}".split())[:80]
        raise ValueError(
            f"the field 'answer' of the task is {shown} (type {type(value).__name__}), which no response equals, so "
            "each would score 0. Give text that is not empty, a number or a list, or leave such rows out"
        )
    return plain


def kind_of(value: object) -> str:
    """The type of a value, with those of the items of a list, and `NO_ANSWER` if `checked_answer` refuses it."""
    value = _without_numpy(value)
    if isinstance(value, list | tuple):
        return f"list of {sorted(set(map(kind_of, value)))}"
    plain = _scalar(value)
    return f"{NO_ANSWER} ({type(value).__name__})" if plain is None else type(plain).__name__


def _without_numpy(value: Any) -> Any:
    """Scalars and arrays of numpy as numbers and lists; of short floats the ones that print them, 0.1 for float32."""
    if not (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return value
    is_short = getattr(value.dtype, "kind", "") == "f" and value.dtype.itemsize < 8
    return (value.astype(str).astype(float) if is_short else value).tolist()


def _scalar(value: object) -> str | bool | int | float | Decimal | None:
    """The value if a response could equal it."""
    if isinstance(value, str):
        is_text = value.strip() not in _GAPS and (value.isascii() or value.encode(errors="ignore").decode() == value)
        return value if is_text else None
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Decimal):
        return value if value.is_finite() else None
    # A response is no fraction.
    if isinstance(value, Real) and not isinstance(value, Rational) and isfinite(value):
        return float(value)
    return None


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n")


def _number(text: str) -> Decimal | None:
    """The number that a text is; None if it is none."""
    if _NUMBER.fullmatch(text) is None:
        return None
    try:
        return Decimal(text)
    except InvalidOperation:  # above the limits of the type
        return None


def _list(text: str, answer: list[Any]) -> list[object] | None:
    """The list that a text is, in JSON or as Python writes it; None if it is none, or far longer than the answer."""
    if not text.startswith("[") or len(text) > max(_MAX_LIST_CHARACTERS, _MAX_LONGER * len(repr(answer))):
        return None
    for read in (partial(json.loads, parse_float=Decimal), ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, ArithmeticError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, list) else None
    return None


def _are_equal(found: object, answer: object) -> bool:
    """Equality of values in which a number equals no truth value; a float is what Python writes for it, or reads."""
    if isinstance(found, list) and isinstance(answer, list):
        return len(found) == len(answer) and all(map(_are_equal, found, answer))
    if isinstance(found, str) and isinstance(answer, str):
        return _with_line_feeds(found) == _with_line_feeds(answer)
    if isinstance(found, bool) != isinstance(answer, bool):
        return False
    if isinstance(found, Decimal) and isinstance(answer, float):
        return found == Decimal(repr(answer)) or float(found) == answer
    if isinstance(found, float) and isinstance(answer, Decimal):  # a list as only Python writes it
        return found == float(answer)
    return found == answer
