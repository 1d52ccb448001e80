"""The consumption gate as it is defined (dataflow/staleness.py): it looks at every live group. Tests judge by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.dataflow.ids import GroupId
from penstock.dataflow.staleness import FlowLimits


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live group as the consumption gate sees it."""

    group_id: GroupId
    deadline: int
    ready: bool


def is_feasible(limits: FlowLimits, version: int, outside: Iterable[int]) -> bool:
    """Can all groups left outside a batch that closes at `version` still train in time?

    Args:
        limits: The bounds.
        version: v, the version the batch closes at.
        outside: Deadlines of the live groups that are not in the batch, ready or not.
    """
    due_by = [0] * (limits.max_staleness + 1)
    for deadline in outside:
        slack = deadline - version
        if slack <= limits.max_staleness:
            due_by[max(slack, 0)] += 1
    due = 0
    for k, count in enumerate(due_by):
        due += count
        if due > k * limits.batch_groups:
            return False
    return True


def choose_batch(limits: FlowLimits, version: int, live: Sequence[Candidate]) -> list[GroupId] | None:
    """The batch that closes now, or None while it has to wait.

    Takes ready groups by earliest deadline, then admission order, and closes only if what is left
    outside stays feasible.
    """
    ready = sorted((c for c in live if c.ready), key=lambda c: (c.deadline, c.group_id))
    if len(ready) < limits.batch_groups:
        return None
    chosen = [c.group_id for c in ready[: limits.batch_groups]]
    inside = set(chosen)
    if not is_feasible(limits, version, (c.deadline for c in live if c.group_id not in inside)):
        return None
    return chosen
