"""Preference pairs: two answers to one task, of which the first is preferred.

They are columns of the tasks (`chosen`, `rejected`: your own dataset, or the `pairs.jsonl` of `penstock sample`), or
synthetic: a full correct answer against a worse one, the same for the same task. The worse one has mistakes as policies
make them: changed digits, or a passage that is left out or repeated. If the task source has `mistaken_response`, half
of the rejected answers have a plausible mistake from it.
"""

from __future__ import annotations

import random

from penstock.dataflow.task import Task
from penstock.envs.contract import TaskSource

MAX_CHANGES = 4
PAIR_COLUMNS = ("chosen", "rejected")


def preferred_pair(source: TaskSource, task: Task) -> tuple[str, str]:
    """The pair of a task: (chosen, rejected).

    Raises:
        ValueError: If there is none: an answer is not text, both are equal, or the task has neither these columns nor a
            source with gold responses.
    """
    given = [task.fields.get(column) for column in PAIR_COLUMNS]
    if given == [None, None]:
        return _synthetic_pair(source, task)
    texts = [value for value in given if isinstance(value, str)]
    if len(texts) < len(PAIR_COLUMNS):
        found = ", ".join(f"{column}={value!r:.60}" for column, value in zip(PAIR_COLUMNS, given, strict=True))
        raise ValueError(f"task {task.task_id}: {found}; expected the text of two answers to the prompt")
    chosen, rejected = texts
    if chosen == rejected:
        raise ValueError(f"task {task.task_id}: chosen and rejected are both {chosen!r:.60}: nothing is preferred")
    return chosen, rejected


def _synthetic_pair(source: TaskSource, task: Task) -> tuple[str, str]:
    """The gold response of a task, and a worse one."""
    if not hasattr(source, "gold_response"):
        raise ValueError(
            f"task {task.task_id} has no columns chosen and rejected, and its source no gold_response(task)"
        )
    gold = source.gold_response(task)
    digits = [place for place, character in enumerate(gold) if character in "0123456789"]
    if not digits:
        raise ValueError(f"task {task.task_id}: its gold response {gold!r} has no digit to change")
    rng = random.Random(f"preferences/{task.task_id}/{task.prompt}")
    if hasattr(source, "mistaken_response") and rng.random() < 0.5:
        return gold, source.mistaken_response(task, rng)
    if len(gold) > 1 and rng.random() < 0.3:
        first, second = rng.sample(range(1, len(gold) + 1), 2)
        return gold, gold[:first] + gold[second:]
    spoilt = list(gold)
    for place in rng.sample(digits, min(len(digits), rng.randint(1, MAX_CHANGES))):
        spoilt[place] = str((int(gold[place]) + rng.randrange(1, 10)) % 10)
    return gold, "".join(spoilt)
