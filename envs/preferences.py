"""Synthetic preferences: a full correct answer against a worse one, the same for the same task, without limit.

Worse is what policies do: digits are changed, a stretch is left out or said twice, or the task source makes a mistake
that looks right (`mistaken_response`): half of the answers, where it knows how.
"""

from __future__ import annotations

import random
from typing import Protocol, runtime_checkable

from penstock.dataflow.trajectory import Task
from penstock.envs.contract import GoldSource

MAX_CHANGES = 4


@runtime_checkable
class MistakeSource(Protocol):
    """A task source that knows how its tasks are got wrong."""

    def mistaken_response(self, task: Task, rng: random.Random) -> str: ...


def answer_pair(source: GoldSource, task: Task) -> tuple[str, str]:
    """The gold response of a task, and a worse one.

    Raises:
        ValueError: If the gold response has no digit to change.
    """
    gold = source.gold_response(task)
    digits = [place for place, character in enumerate(gold) if character in "0123456789"]
    if not digits:
        raise ValueError(f"task {task.task_id}: its gold response {gold!r} has no digit to change")
    rng = random.Random(f"preferences/{task.task_id}/{task.prompt}")
    if isinstance(source, MistakeSource) and rng.random() < 0.5:
        return gold, source.mistaken_response(task, rng)
    if len(gold) > 1 and rng.random() < 0.3:
        first, second = rng.sample(range(1, len(gold) + 1), 2)
        return gold, gold[:first] + gold[second:]
    spoilt = list(gold)
    for place in rng.sample(digits, min(len(digits), rng.randint(1, MAX_CHANGES))):
        spoilt[place] = str((int(gold[place]) + rng.randrange(1, 10)) % 10)
    return gold, "".join(spoilt)
