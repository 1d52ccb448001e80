"""A worked sum that follows from itself, whatever it says of digits."""

from __future__ import annotations

from itertools import islice

import pytest

from penstock.envs.arithmetic import ArithmeticTasks, Problem
from penstock.envs.arithmetic_form import is_consistent


def test_gold_responses_follow_from_their_steps() -> None:
    source = ArithmeticTasks(seed=0, digits=4, min_digits=1)
    for task in islice(source.train(), 300):
        assert isinstance(task.prompt, str)
        assert is_consistent(Problem.from_prompt(task.prompt), source.gold_response(task)), task.prompt


@pytest.mark.parametrize(
    ("response", "follows"),
    [
        ("7+5+0=12;4+8+1=13;132", True),
        ("7+5+0=11;4+8+1=13;131", True),  # a wrong sum, faithfully carried on
        ("7+5+0=2;4+8+0=12;122", True),
        ("7+5+0=12;4+8+0=12;122", False),  # the carry is lost
        ("7+5+0=12;4+8+1=13;133", False),  # the answer is not that of the steps
        ("7+6+0=13;4+8+1=13;133", False),  # another column
        ("7+5+0=12;132", False),  # a column is missing
        ("7+5+0=12;4+8+1=13;13", False),
        ("7+5+0=12;4+8+1=13;0132", False),
        ("", False),
    ],
)
def test_only_form_is_judged(response: str, follows: bool) -> None:
    assert is_consistent(Problem.from_prompt("47+85="), response) is follows
