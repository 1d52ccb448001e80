"""Tasks that are drawn, not stored: a user writes `draw`, and gets a reproducible stream and a disjoint held-out set.

A hash (blake2b) of a task's prompt and fields, or of the keys that `split_by` returns, alone decides whether the task
is held out, so training and held-out tasks are disjoint for every seed. Sources of stored tasks (adapters/) use the
same functions to split and shuffle.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableSequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task

HELD_OUT_SHARE = 0.1
_Item = TypeVar("_Item")
_FRUITLESS_DRAWS = 20_000
"""After this many draws in a row without a new task, the source is considered exhausted."""


@dataclass(eq=False)
class GeneratedTasks(ABC):
    """Task source over `draw`.

    Args:
        seed: Order of the training stream. Held-out tasks do not depend on it.
    """

    seed: int

    @abstractmethod
    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """One task: `prompt` (text or chat messages), and the fields that environment and reward need."""

    def split_by(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys that identify a task, by default all; leave out those that may differ between equal tasks."""
        return row

    @property
    def name(self) -> str:
        """Prefix of the task ids."""
        return type(self).__name__

    def train(self) -> Iterator[Task]:
        """Endless stream of tasks that are not held out, the same for the same seed.

        Raises:
            ValueError: If `draw` gives only held-out tasks, or no prompt.
            ConfigError: If a field that the split depends on is not JSON.
        """
        rng = random.Random(f"{self.name}/train/{self.seed}")
        index = fruitless = 0
        while True:
            row = self._drawn(rng)
            fruitless += 1
            if not is_held_out(self.split_by(row)):
                yield row_task(row, f"{self.name}/train/{index}")
                index, fruitless = index + 1, 0
            elif fruitless >= _FRUITLESS_DRAWS:
                raise ValueError(f"{self.name}.draw gave {fruitless} tasks in a row that are held out: draw more kinds")

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` distinct held-out tasks of one fixed stream; all that are found if there are fewer."""
        rng = random.Random(f"{self.name}/held-out")
        rows: dict[bytes, Mapping[str, Any]] = {}
        fruitless = 0
        while len(rows) < num_tasks and fruitless < _FRUITLESS_DRAWS:
            row = self._drawn(rng)
            split_by = self.split_by(row)
            key = row_key(split_by)
            fruitless += 1
            if is_held_out(split_by) and key not in rows:
                rows[key], fruitless = row, 0
        return [row_task(row, f"{self.name}/held_out/{index}") for index, row in enumerate(rows.values())]

    def _drawn(self, rng: random.Random) -> Mapping[str, Any]:
        row = self.draw(rng)
        if not isinstance(row, Mapping) or "prompt" not in row:
            got = f"keys {sorted(row)}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
            raise ValueError(f"{self.name}.draw(rng) gave {got}; expected a dict with 'prompt' and the task's fields")
        return row


def row_task(row: Mapping[str, Any], task_id: str) -> Task:
    """The task of a row: all but its prompt are fields."""
    return Task(TaskId(task_id), row["prompt"], {name: value for name, value in row.items() if name != "prompt"})


def row_key(row: Mapping[str, Any]) -> bytes:
    """A key that is equal for equal rows, in every process.

    Raises:
        ConfigError: If a field is not JSON: its text may differ between processes (a set), and with it the split.
    """
    for name, value in row.items():
        try:
            json.dumps(value, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"env: field {name!r} of a task is {value!r:.80} of type {type(value).__name__}, which is not JSON "
                f"({error}), so the task could be held out in one process and not in another. Give numbers, "
                "text, lists (a sorted one for a set) or dicts, or leave the field out in split_by(row)."
            ) from error
    return blake2b(json.dumps(dict(row), sort_keys=True).encode(), digest_size=8).digest()


def is_held_out(row: Mapping[str, Any]) -> bool:
    """Whether the hash of the row holds it out."""
    return is_held_out_key(int.from_bytes(row_key(row), "big"))


def is_held_out_key(key: int, share: float = HELD_OUT_SHARE) -> bool:
    """Whether `key` is among the share of keys that are held out, in steps of 0.01 %; a larger share holds more out."""
    return (key % 100) * 100 + key // 100 % 100 < round(share * 10_000)


def endless(items: MutableSequence[_Item], seed: str) -> Iterator[_Item]:
    """Every item once per epoch, each epoch in a new order, the same for the same seed. Needs at least one item."""
    rng = random.Random(seed)
    order = items[:]
    while True:
        rng.shuffle(order)
        yield from order
