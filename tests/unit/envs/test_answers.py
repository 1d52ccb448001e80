"""A response and the answer of a row are compared by value, or the answer is refused by its field and type."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.envs.tasks.arithmetic import exact_match
from penstock.envs.tasks.math_tasks import math_verify_reward


def answered(text: str) -> Any:
    return SimpleNamespace(response=text, finish_reason="stop")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1+2=;3", 3),
        ("3", 3.0),
        ("3", "3.0"),
        ("3.0", 3),
        ("-7", -7),
        ("1e3", 1000),
        ("0.10", 0.1),
        ("3", " 3"),
        (" 3\n", "3"),
        ("3", np.int64(3)),
        ("2.5", np.float32(2.5)),
        ("9" * 4000, int("9" * 4000)),
        ("True", True),
        ("false", False),
        ("[1, 2]", [1, 2.0]),
        ("['a', 'b']", ["a", "b"]),
        ('["a", ["b"]]', ("a", ["b"])),
        ("[1, 2]", np.array([1, 2])),
        ("[null, \"\"]", [None, ""]),
        ("x = 1; y = 2", "x = 1; y = 2"),
        ("First;x = 1; y = 2 ", "x = 1; y = 2"),
        ("SELECT 1;", "SELECT 1;"),
        ('So;["a;b"]', ["a;b"]),
        ("So;['a;b', ['c;']]", ["a;b", ["c;"]]),
        ("0.1", np.float32(0.1)),
        ("0.1", np.float16(0.1)),
        ("[0.1, [2.5]]", [np.float32(0.1), [np.float16(2.5)]]),
        ("[[0.1], [0.2]]", np.array([[0.1], [0.2]], np.float32)),
        ("12345678901234567890.12", Decimal("12345678901234567890.12")),
        ("[12345678901234567890.12]", [Decimal("12345678901234567890.120")]),
        ("['a', 0.5]", ["a", Decimal("0.50")]),
        ("3", Decimal(3)),
        ("3.141592653589793238", 3.141592653589793238),
        ("[3.141592653589793238]", [3.141592653589793238]),
        ("9007199254740993", 9007199254740993.0),
        ("[9007199254740993.0]", [9007199254740993]),
        (str(list(range(8000))), list(range(8000))),
        (json.dumps(["é" * 5000]), ["é" * 5000]),
        ("a\nb", "a\r\nb"),
        ("a\r\nb", "a\nb"),
        ('["a\\nb"]', ["a\r\nb"]),
    ],
)  # fmt: skip
def test_numbers_lists_and_padded_text_are_compared_by_value(text: str, answer: Any) -> None:
    assert exact_match(answered(text), answer) == 1.0
    assert exact_match(SimpleNamespace(response=text, finish_reason="length"), answer) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1", True),
        ("True", 1),
        ("0", False),
        ("[true]", [1]),
        ("4", 3),
        ("3.0000001", 3),
        ("007", "7"),
        ("3 4", "34"),
        ("", 3),
        ("three", 3),
        ("１", 1),
        ("1" * 10 + "e99999", 3.0),
        ("[2, 1]", [1, 2]),
        ("[1", [1]),
        ("[" * 5000, [1]),
        ("a", ["a"]),
        ("y = 2", "x = 1; y = 2"),
        ("x = 1; y = 2;", "x = 1; y = 2"),
        ("12345678901234567890.13", Decimal("12345678901234567890.12")),
        ("[12345678901234567890.13]", [Decimal("12345678901234567890.12")]),
        ("0.10000000149011612", np.float32(0.1)),
        ("9007199254740993", 9007199254740992),
        ("[1]" + " " * 30_000 + "x", [1]),
        ("[1, " + "2, " * 10_000 + "3]", [1]),
        ("a\nb", "a\n\nb"),
    ],
)
def test_a_truth_value_is_no_number_and_text_without_a_decimal_point_is_text(text: str, answer: Any) -> None:
    assert exact_match(answered(text), answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        *(None, math.nan, math.inf, "", " \n", "nan", {"a": 1}, b"3", [math.nan], np.array([np.nan])),
        *(
            Fraction(1, 3),
            Decimal("nan"),
            Decimal("sNaN"),
            Decimal("inf"),
            np.float32("nan"),
            "half \ud83d",
            ["\ud83d"],
        ),
    ],
)
@pytest.mark.parametrize("reward", [exact_match, math_verify_reward])
def test_an_answer_that_no_response_equals_is_refused_with_field_and_type(reward: Any, answer: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^the field 'answer' of the task is .*\(type \w+\), which no response equals.*$"
    ):
        reward(answered("3"), answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("0.0000001", 1e-7),
        ("10^{-7}", 1e-7),
        ("1e-07", 1e-7),
        ("100000000000000000000000", 1e23),
        ("[0.0000001, 1]", [1e-7, 1]),
        ("12345678901234567890.12", Decimal("12345678901234567890.12")),
        ("true", True),
        ("True", True),
        ("false", False),
        ("['a', 'b']", ["a", "b"]),
    ],
)
def test_math_verify_compares_with_numbers_and_truth_values_as_mathematics_and_python_write_them(
    text: str, answer: Any
) -> None:
    assert math_verify_reward(answered(f"\\boxed{{{text}}}"), answer) == 1.0
    assert math_verify_reward(answered("\\boxed{7}"), answer) == 0.0
