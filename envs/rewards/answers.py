"""The comparison of a response with the answer of a row: rows hold text, numbers and lists, and a response is text.

| answer | equal to the text |
|---|---|
| text | if they are the same, without white space around them |
| text of a number with a decimal point, "3.0" | as a number: tables write whole numbers so if their column has gaps |
| int, float | if it is a number of the same value: 3 and 3.0 equal "3", "3.0" and "3e0" |
| bool | "True" or "true", "False" or "false"; never a number |
| list | if it is a list of equal values in the same order, in JSON or as Python writes it; not one of its values |
| nothing, empty text, NaN (also as text: tables write gaps so), infinity, other types | refused: each would score 0 |
"""

from __future__ import annotations

import ast
import json
import math
import re
from decimal import Decimal, InvalidOperation
from numbers import Integral, Real
from typing import Any

AnswerValue = str | bool | int | float | list[Any]
"""What a row may hold as its answer, as JSON types."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_MAX_LIST_CHARACTERS = 20_000
_GAPS = ("", "nan", "NaN")


def equals_answer(text: str, answer: AnswerValue, field: str = "answer") -> bool:
    """Whether the text of a response is the answer of a row, by the table above.

    Args:
        text: What the response gives as its answer.
        answer: Value of the row.
        field: Name of its column, for messages.

    Raises:
        ValueError: If the answer cannot be compared, with the field and the type.
    """
    plain, text = checked_answer(answer, field), text.strip()
    if isinstance(plain, list):
        found = _list(text)
        return found is not None and _are_equal(found, plain)
    if isinstance(plain, str):
        own = plain.strip()
        is_number = "." in own and _number(own) is not None
        return text == own or (is_number and _number(text) == _number(own))
    if isinstance(plain, bool):
        return text in (str(plain), str(plain).lower())
    number = _number(text)
    # A float is the number that Python writes for it: 0.1 equals "0.1" and "0.10".
    return number is not None and number == (Decimal(repr(plain)) if isinstance(plain, float) else Decimal(plain))


def checked_answer(answer: object, field: str = "answer") -> AnswerValue:
    """The answer as a JSON type; scalars and arrays of numpy become numbers and lists.

    Raises:
        ValueError: If no response could equal it, with the field and the type.
    """
    value = answer.tolist() if hasattr(answer, "tolist") and hasattr(answer, "shape") else answer
    if isinstance(value, bool) or (isinstance(value, str) and value.strip() not in _GAPS):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real | Decimal) and math.isfinite(value):
        return float(value)
    if isinstance(value, list | tuple):
        return [one if one is None or one == "" else checked_answer(one, field) for one in value]
    raise ValueError(
        f"the field {field!r} of the task is {value!r:.80} (type {type(value).__name__}), which no response equals, so "
        "each would score 0. Give text that is not empty, a number or a list, or leave such rows out"
    )


def _number(text: str) -> Decimal | None:
    """The number that a text is; None if it is none."""
    if _NUMBER.fullmatch(text) is None:
        return None
    try:
        return Decimal(text)
    except InvalidOperation:  # above the limits of the type
        return None


def _list(text: str) -> list[object] | None:
    """The list that a text is, in JSON or as Python writes it; None if it is none."""
    if not text.startswith("[") or len(text) > _MAX_LIST_CHARACTERS:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, list) else None
    return None


def _are_equal(found: object, answer: object) -> bool:
    """Equality of JSON values in which a number equals no truth value."""
    if isinstance(found, list) and isinstance(answer, list):
        return len(found) == len(answer) and all(map(_are_equal, found, answer))
    return found == answer and isinstance(found, bool) == isinstance(answer, bool)
