"""Preferences: of columns; synthetic ones; and mistakes of arithmetic that look right."""

from __future__ import annotations

import random
import re
from itertools import islice

import pytest

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.tasks.arithmetic import MISTAKES, ArithmeticTasks, Problem, worked_response
from penstock.envs.tasks.preferences import preferred_pair


class Answers:
    """A source with gold responses but without mistaken ones."""

    def __init__(self) -> None:
        self.source = ArithmeticTasks(seed=0)
        self.gold_response = self.source.gold_response


def test_a_correct_answer_is_spoilt_in_a_few_digits_or_a_stretch_and_the_same_every_time() -> None:
    answers, counts, num_stretches = Answers(), set(), 0
    for task in islice(answers.source.train(), 300):
        chosen, rejected = preferred_pair(answers, task)
        assert chosen == answers.gold_response(task) != rejected
        assert preferred_pair(answers, task) == (chosen, rejected)
        if len(rejected) != len(chosen):
            num_stretches += 1
            continue
        changed = [index for index, (a, b) in enumerate(zip(chosen, rejected, strict=True)) if a != b]
        assert all(rejected[place].isdigit() for place in changed)
        counts.add(len(changed))
    assert counts == {1, 2, 3, 4}
    assert 50 < num_stretches < 130


@pytest.mark.parametrize("operators", ["+", "-"])
def test_a_mistake_looks_right_and_is_one(operators: str) -> None:
    source = ArithmeticTasks(seed=0, digits=3, operators=operators)
    num_consistent = 0
    for task in islice(source.train(), 400):
        gold, wrong = source.gold_response(task), source.mistaken_response(task, random.Random(str(task.task_id)))
        assert wrong != gold
        *steps, answer = wrong.split(";")
        assert all(re.fullmatch(r"\d+[+-]\d+[+-]\d+=\d+", step) for step in steps)
        assert len(steps) == gold.count(";")
        last_digits = [step.rpartition("=")[2][-1] for step in reversed(steps)]
        num_consistent += answer.endswith("".join(last_digits).lstrip("0"))
    assert 200 < num_consistent < 400, "the answer follows from the columns, unless it is the mistake"


def test_each_kind_of_mistake_is_made() -> None:
    problem = Problem(648, "+", 257)
    made = {worked_response(problem, random.Random(seed)) for seed in range(300)}
    examples = {
        "sum": "8+7+0=14;4+5+1=10;6+2+1=9;904",
        "digit": "8+7+0=15;4+4+1=9;6+2+0=8;895",
        "carry": "8+7+0=15;4+5+0=9;6+2+0=8;895",
        "answer": "8+7+0=15;4+5+1=10;6+2+1=9;915",
    }
    assert set(examples) == set(MISTAKES)
    assert set(examples.values()) <= made


def test_an_answer_without_digits_is_refused() -> None:
    class Words:
        def gold_response(self, task: Task) -> str:
            return "none"

    with pytest.raises(ValueError, match="'none' has no digit"):
        preferred_pair(Words(), Task(TaskId("t"), "p"))


def test_columns_are_the_pair_whatever_else_the_source_has() -> None:
    task = Task(TaskId("rows/0"), "12+13=", {"chosen": "25", "rejected": "24"})
    assert preferred_pair(ArithmeticTasks(seed=0), task) == ("25", "24")
    silent = Task(TaskId("rows/1"), "12+13=", {"chosen": "25", "rejected": ""})
    assert preferred_pair(object(), silent) == ("25", ""), "a policy may say nothing at all"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"chosen": "25"}, "rejected=None; expected the text of two answers"),
        ({"chosen": "25", "rejected": ["24"]}, r"rejected=\['24'\]"),
        ({"chosen": "25", "rejected": "25"}, "nothing is preferred"),
        ({}, "no columns chosen and rejected"),
    ],
)
def test_a_task_without_a_pair_is_named(columns: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"task rows/0.*{words}"):
        preferred_pair(object(), Task(TaskId("rows/0"), "12+13=", columns))
