"""Rows of a dataset as single-turn tasks: JSONL, Parquet, a Hugging Face dataset, or the result of your own function.

    env=dataset env.args.path=rows.jsonl env.args.prompt_field=question reward.fn=my_rewards:correct

Every column except the prompt's becomes a field of the task, and so a keyword argument of the reward.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.trajectory import Task
from penstock.envs.import_path import load_object, nearest_hint
from penstock.envs.tasks.generated_tasks import endless, first, is_held_out, row_key


@dataclass(eq=False)
class RowTasks:
    """Task source over rows. Rows are loaded for the first task.

    A hash of the prompt holds out a tenth of the rows, for every seed. Equal prompts are always in the same split.

    Args:
        seed: Order of the training stream.
        path: A `.jsonl` or `.parquet` file, or the name of a Hugging Face dataset.
        rows: Import path of a function without arguments that returns a list of dicts, instead of `path`.
        split: Split of a Hugging Face dataset.
        prompt_field: Column of the prompt: text, or chat messages.
        id_field: Column of the task id; None numbers the rows.
        required_fields: Columns that every row must have, e.g. those that the reward takes.
        system: Text of a system message before a prompt that is text; the prompt then becomes a user message.
        chat: Turn a prompt that is text into a user message.

    Raises:
        ValueError: If not exactly one of `path` and `rows` is given.
    """

    seed: int
    path: str | None = None
    rows: str | None = None
    _: KW_ONLY
    split: str = "train"
    prompt_field: str = "prompt"
    id_field: str | None = None
    required_fields: Iterable[str] = ()
    system: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        if (self.path is None) == (self.rows is None):
            raise ValueError(f"path={self.path!r} and rows={self.rows!r}: give exactly one of the two")

    def train(self) -> Iterator[Task]:
        """Endless stream of rows that are not held out: every epoch is a new shuffle, the same for the same seed."""
        order = [task for task in self._tasks if not _is_held_out(task)]
        if not order:
            raise ConfigError(f"env: all {len(self._tasks)} rows of {self._where} are held out: there are too few.")
        yield from endless(order, f"rows/train/{self.seed}")

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` held-out rows of a fixed shuffle, each prompt once.

        Raises:
            ValueError: If there are fewer, with both numbers.
        """
        unique = {row_key({"prompt": task.prompt}): task for task in self._tasks if _is_held_out(task)}
        tasks = list(unique.values())
        random.Random("rows/held-out").shuffle(tasks)
        return first(num_tasks, tasks, f"the held-out part of {self._where}")

    def stored(self) -> list[Task]:
        """All training and held-out rows (fingerprint.py)."""
        return self._tasks

    @property
    def _where(self) -> str:
        return self.path or f"{self.rows}()"

    @cached_property
    def _tasks(self) -> list[Task]:
        rows = self._load()
        if not rows:
            raise ConfigError(f"env: {self._where} has no rows.")
        tasks = [self._task(index, row) for index, row in enumerate(rows)]
        twice = [name for name, count in Counter(task.task_id for task in tasks).items() if count > 1]
        if twice:
            raise ConfigError(
                f"env.args.id_field={self.id_field}: {len(twice)} ids of {self._where} occur more than once, e.g. "
                f"{twice[0]!r}: tasks could not be told apart. Use another column, or null to number them."
            )
        return tasks

    def _task(self, index: int, row: Mapping[str, Any]) -> Task:
        if not isinstance(row, Mapping):
            raise ConfigError(f"env: row {index} of {self._where} is a {type(row).__name__}; expected a dict.")
        for name in filter(None, [self.prompt_field, self.id_field, *self.required_fields]):
            if name not in row:
                raise ConfigError(
                    f"env: row {index} of {self._where} has no field {name!r}; it has {sorted(row)}."
                    f"{nearest_hint(name, row)}"
                )
        prompt = row[self.prompt_field]
        if isinstance(prompt, str) and (self.chat or self.system is not None):
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt = [*system, {"role": "user", "content": prompt}]
        name = str(row[self.id_field]) if self.id_field else f"rows/{index}"
        fields = {key: value for key, value in row.items() if key != self.prompt_field and key.isidentifier()}
        return Task(TaskId(name), prompt, fields)

    def _load(self) -> list[dict[str, Any]]:
        """Read all rows.

        Raises:
            ConfigError: If they cannot be loaded; the message says what was searched.
        """
        if self.rows is not None:
            function = load_object(self.rows, "env.args.rows")
            return list(function() if callable(function) else function)
        assert self.path is not None, "either path or rows is given"
        path = Path(self.path).expanduser()
        if path.suffix not in (".jsonl", ".parquet"):
            import datasets

            try:
                return list(datasets.load_dataset(self.path, split=self.split))
            except (OSError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"env.args.path={self.path}: no .jsonl or .parquet file, and no dataset of that name with "
                    f"split {self.split!r} within reach ({type(error).__name__}: {error})."
                ) from error
        if not path.is_file():
            raise ConfigError(f"env.args.path={self.path}: no such file (looked in {Path.cwd()}).")
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                return list(pq.read_table(path).to_pylist())
            except pa.ArrowInvalid as error:
                raise ConfigError(f"env.args.path={path} is no Parquet file: {error}") from error
        rows = []
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip():
                        rows.append(json.loads(line))
                except ValueError as error:
                    raise ConfigError(f"env.args.path={path}, line {number} is not JSON: {error}") from error
        return rows


def _is_held_out(task: Task) -> bool:
    return is_held_out({"prompt": task.prompt})
