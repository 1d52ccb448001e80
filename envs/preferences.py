"""Synthetic preferences: a full correct answer against the same with one digit changed, wherever that is.

Any task source that knows gold responses gives them, without limit and the same for the same task.
"""

from __future__ import annotations

import random

from penstock.dataflow.trajectory import Task
from penstock.envs.contract import GoldSource


def answer_pair(source: GoldSource, task: Task) -> tuple[str, str]:
    """The gold response of a task, and a spoilt one of the same length.

    Raises:
        ValueError: If the gold response has no digit to change.
    """
    gold = source.gold_response(task)
    digits = [place for place, character in enumerate(gold) if character in "0123456789"]
    if not digits:
        raise ValueError(f"task {task.task_id}: its gold response {gold!r} has no digit to change")
    rng = random.Random(f"preferences/{task.task_id}/{task.prompt}")
    place = rng.choice(digits)
    wrong = (int(gold[place]) + rng.randrange(1, 10)) % 10
    return gold, f"{gold[:place]}{wrong}{gold[place + 1 :]}"
