"""Synthetic preferences: a few digits of a correct answer are changed."""

from __future__ import annotations

from itertools import islice

import pytest

from penstock.dataflow.ids import TaskId
from penstock.dataflow.trajectory import Task
from penstock.envs.arithmetic import ArithmeticTasks
from penstock.envs.preferences import answer_pair


def test_the_rejected_answer_differs_in_one_to_four_digits_and_is_the_same_every_time() -> None:
    source = ArithmeticTasks(seed=0)
    places, counts = set(), set()
    for task in islice(source.train(), 200):
        chosen, rejected = answer_pair(source, task)
        assert chosen == source.gold_response(task)
        assert len(rejected) == len(chosen)
        changed = [index for index, (a, b) in enumerate(zip(chosen, rejected, strict=True)) if a != b]
        assert all(rejected[place].isdigit() for place in changed)
        assert answer_pair(source, task) == (chosen, rejected)
        places.update(changed)
        counts.add(len(changed))
    assert counts == {1, 2, 3, 4}
    assert len(places) > 5, "not always the same place"


def test_an_answer_without_digits_is_refused() -> None:
    class Words:
        def gold_response(self, task: Task) -> str:
            return "none"

    with pytest.raises(ValueError, match="'none' has no digit"):
        answer_pair(Words(), Task(TaskId("t"), "p"))
