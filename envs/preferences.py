"""Synthetic preferences: a full correct answer against the same with one to four digits changed, wherever they are.

That is how a half-trained policy errs: answers with several mistakes are seen through first, then those with one.

Any task source that knows gold responses gives them, without limit and the same for the same task.
"""

from __future__ import annotations

import random

from penstock.dataflow.trajectory import Task
from penstock.envs.contract import GoldSource

MAX_CHANGES = 4


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
    spoilt = list(gold)
    for place in rng.sample(digits, min(len(digits), rng.randint(1, MAX_CHANGES))):
        spoilt[place] = str((int(gold[place]) + rng.randrange(1, 10)) % 10)
    return gold, "".join(spoilt)
