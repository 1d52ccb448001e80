"""Orders of tasks that come from a finite list: endless for training, fixed for evaluation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from penstock.dataflow.trajectory import Task


def endless(tasks: Sequence[Task], seed: str) -> Iterator[Task]:
    """Every task once per epoch, each epoch a new shuffle, the same for the same seed. At least one task."""
    rng = random.Random(seed)
    order = list(tasks)
    while True:
        rng.shuffle(order)
        yield from order


def first(num_tasks: int, tasks: Sequence[Task], where: str) -> list[Task]:
    """The first `num_tasks`.

    Args:
        num_tasks: How many.
        tasks: In their order.
        where: What they are, for the error.

    Raises:
        ValueError: If there are fewer, with both numbers.
    """
    if num_tasks > len(tasks):
        raise ValueError(f"{where} has {len(tasks)} tasks, {num_tasks} were asked for.")
    return list(tasks[:num_tasks])
