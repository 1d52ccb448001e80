"""Rows of files, of a Hugging Face dataset, or of your own function, as single-turn tasks.

    env=dataset env.args.path=train.jsonl env.args.held_out=validation.jsonl reward.fn=my_rewards:correct

Every column except the prompt's becomes a field of the task, and so a keyword argument of the reward. Rows stay in
their files (envs/row_files.py): in memory are the place of each row and a hash of its prompt.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.adapters.chat_messages import (
    TOO_DEEP,
    Message,
    MessageError,
    checked_message,
    is_deep,
    is_unicode,
    messages_in,
    with_system,
)
from penstock.envs.import_path import load_object, nearest_hint
from penstock.envs.row_files import EVALUATION_SPLITS, FORMATS, has_splits, open_rows
from penstock.envs.row_tables import PACKED, Row, RowTable, TableRows
from penstock.envs.tasks.generated_tasks import HELD_OUT_SHARE, endless, is_held_out_key, row_key

Location = str | Sequence[str] | Mapping[str, Any]
"""A path or a list of paths, or a section with `path`, `subset` and `split`, or with `rows`."""

_LOCATION_KEYS = ("path", "rows", "subset", "split")
_SPLIT = re.compile(r"\w[\w.-]*(\[[\d:%-]*\])?")
_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


class _Part(NamedTuple):
    """Rows that are in one split: their table, their places in it, and the prefix of their task ids."""

    table: RowTable
    indices: array[int]
    prefix: str
    evaluation_set: str = ""
    is_trained_on: bool = False


class RowTasks:
    """Task source over rows. They are read, and all of them are checked, for the first task.

    Args:
        seed: Order of the training stream.
        path: A `.jsonl`, `.json`, `.csv` or `.tsv` file, also with `.gz`, or a `.parquet` file, a pattern such as
            `data/*.jsonl`, a folder of `save_to_disk`, or the name of a Hugging Face dataset; or a list of them.
        rows: Import path of a function without arguments that returns a list of dicts or a `datasets.Dataset`, instead
            of `path`.
        subset: Configuration of a Hugging Face dataset, if it has several.
        split: Split to train on; None is `train`. Files have no splits.
        held_out: Rows that are evaluated on and not trained on: a share of the rows, chosen by a hash of the prompt; a
            split of `path`; a path; a section `{path: …, subset: …, split: …}` or `{rows: …}`; or, for several
            evaluation sets, `{NAME: split, path or section}`. None is a tenth. Training skips held-out prompts. `train`
            (or the split that is trained on) evaluates on the training rows themselves.
        prompt_field: Column of the prompt: text, or chat messages, which a column of text holds as JSON.
        id_field: Column of the task id; None numbers the rows.
        columns: Field of the task -> its column. Other columns keep their names.
        required_fields: Fields that must not be missing in any row, e.g. those that the reward takes.
        system: Text of a system message before every prompt that has none; a prompt that is text then becomes a user
            message.
        chat: Turn a prompt that is text into a user message.

    Raises:
        ValueError: If not exactly one of `path` and `rows` is given.
        ConfigError: If another argument is invalid, or without effect.
    """

    _known: ClassVar[dict[Hashable, array[int]]] = {}
    """Hashes of the prompts of files that this process has checked, by the state of the files and the arguments."""

    def __init__(
        self,
        seed: int,
        path: str | Sequence[str] | None = None,
        rows: str | None = None,
        *,
        subset: str | None = None,
        split: str | None = None,
        held_out: float | Location | Mapping[str, Location] | None = None,
        prompt_field: str = "prompt",
        id_field: str | None = None,
        columns: Mapping[str, str] | None = None,
        required_fields: Iterable[str] = (),
        system: str | None = None,
        chat: bool = False,
    ) -> None:
        if (path is None) == (rows is None):
            raise ValueError(f"path={path!r} and rows={rows!r}: give exactly one of the two")
        _check_texts(prompt_field=prompt_field)
        optional = {"rows": rows, "subset": subset, "split": split, "id_field": id_field, "system": system}
        _check_texts(**{name: value for name, value in optional.items() if value is not None})
        if isinstance(required_fields, str) or not isinstance(required_fields, Iterable):
            raise ConfigError(f"env.args.required_fields={required_fields!r}: expected a list, [{required_fields}].")
        if not isinstance(chat, bool):
            raise ConfigError(f"env.args.chat={chat!r}: expected true or false.")
        self.seed = seed
        self._path, self._rows, self._subset, self._split = path, rows, subset, split
        self._where = f"{rows}()" if path is None else str(path)
        self._prompt_field, self._id_field = prompt_field, id_field
        self._columns = _checked_columns(columns or {})
        self._required = tuple(required_fields)
        self._system, self._is_chat = system, chat or system is not None
        self._is_held_out_given = held_out is not None
        self._share: float | None = HELD_OUT_SHARE
        self._sets: dict[str, Location] = {}
        if isinstance(held_out, int | float):
            if isinstance(held_out, bool) or not 0 < held_out < 1:
                raise ConfigError(
                    f"env.args.held_out={held_out}: a share is above 0 and below 1; rows are needed for both, training "
                    "and evaluation."
                )
            self._share = held_out
        elif held_out is not None:
            self._share = None
            self._sets = _named_sets(held_out)

    def train(self) -> Iterator[Task]:
        """Endless stream of rows that are not held out: every epoch is a new shuffle, the same for the same seed."""
        train = self._parts[0]
        if not train.indices:
            hint = " held_out=train evaluates on the training rows themselves." if self._sets else ""
            raise ConfigError(
                f"env: all {len(train.table)} rows of {self._where} are held out, so none is left to train on.{hint}"
            )
        return (self._task(train, index) for index in endless(train.indices, f"rows/train/{self.seed}"))

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` held-out rows of a fixed shuffle, each prompt once; of several sets, taken in turn."""
        shuffled = []
        for part in self._parts[1:]:
            places = [(part, index) for index in part.indices]
            random.Random("rows/held-out").shuffle(places)
            shuffled.append(places)
        in_turn = (place for places in zip_longest(*shuffled) for place in places if place is not None)
        return [self._task(part, index) for part, index in islice(in_turn, num_tasks)]

    def stored(self) -> dict[str, Iterator[Task]]:
        """Name of a split -> all its tasks, in the order of the data (fingerprint.py)."""
        train, *held_out = self._parts
        named = {f"held_out/{part.evaluation_set}".removesuffix("/"): part for part in held_out}
        return {name: self._in_order(part) for name, part in {"train": train, **named}.items()}

    def where(self, task: Task) -> str:
        """The place of the row of a task, for messages; of tasks with ids of the user's own it is the id."""
        prefix, _, number = task.task_id.rpartition("/")
        tables = {part.prefix: part.table for part in reversed(self._parts)}
        return task.task_id if self._id_field or prefix not in tables else tables[prefix].where(int(number))

    def left_out(self) -> str:
        """A sentence about the columns of the first row that are no fields; empty if there are none."""
        return left_out_hint({name: 0 for name in self._parts[0].table[0] if name not in self._columns.values()})

    @cached_property
    def _parts(self) -> list[_Part]:
        """The training rows, then the rows of every evaluation set."""
        table = self._training_table()
        keys = self._checked_keys(table, "rows")
        if self._share is not None:
            unique = {key: index for index, key in enumerate(keys) if is_held_out_key(key, self._share)}
            train = array("Q", (index for index, key in enumerate(keys) if key not in unique))
            if not train and not self._is_held_out_given:  # of very few rows a tenth may be all of them
                train, unique = array("Q", range(len(keys))), {}
            return [_Part(table, train, "rows"), _Part(table, array("Q", unique.values()), "rows")]
        parts, unseen = [], set[int]()
        for name, location in self._sets.items():
            if self._is_training_rows(location):
                continue
            own = self._open_held_out(location, f"env.args.held_out.{name}".removesuffix("."))
            prefix = name or "held_out"
            unique = {key: index for index, key in enumerate(self._checked_keys(own, prefix))}
            unseen |= unique.keys()
            parts.append(_Part(own, array("Q", unique.values()), prefix, name))
        train = array("Q", (index for index, key in enumerate(keys) if key not in unseen))
        for name in (name for name, location in self._sets.items() if self._is_training_rows(location)):
            unique = {keys[index]: index for index in train}
            parts.append(_Part(table, array("Q", unique.values()), "rows", name, is_trained_on=True))
        return [_Part(table, train, "rows"), *parts]

    def _is_training_rows(self, location: Location) -> bool:
        """Whether a location of held-out rows is that of the training rows themselves."""
        is_split = isinstance(location, str) and _is_split_name(location)
        return is_split and location in ({self._split} if self._split is not None else {"train"})

    def _training_table(self) -> RowTable:
        if self._path is None:
            for name, value in (("split", self._split), ("subset", self._subset)):
                if value is not None:
                    raise ConfigError(f"env.args.{name}={value}: rows of a function have no {name}s. Leave it out.")
            assert self._rows is not None, "either path or rows is given"
            return _rows_of(self._rows, "env.args.rows")
        table = open_rows(self._path, "env.args.path", subset=self._subset, split=self._split)
        split = self._split or "train"
        trained = {one.partition("[")[0] for one in split.split("+")}
        if trained & set(EVALUATION_SPLITS) and not self._is_held_out_given:
            raise ConfigError(
                f"env.args.split={split}: split names the rows that are trained on. To evaluate on {split}, write "
                f"held_out={split} instead. To train on it, say what is held out, e.g. held_out=0.2."
            )
        return table

    def _open_held_out(self, location: Location, key: str) -> RowTable:
        if isinstance(location, Mapping):
            unknown = [name for name in location if name not in _LOCATION_KEYS]
            if unknown or ("path" in location) == ("rows" in location):
                raise ConfigError(
                    f"{key}={dict(location)}: a section has either path, with subset and split, or rows."
                    + "".join(nearest_hint(name, _LOCATION_KEYS) for name in unknown)
                )
            if "rows" in location:
                return _rows_of(location["rows"], f"{key}.rows")
            path, subset, split = (location.get(name) for name in ("path", "subset", "split"))
            return open_rows(path, f"{key}.path", subset=subset, split=split, default_split=None)  # type: ignore[arg-type]
        if isinstance(location, str) and _is_split_name(location):
            if not has_splits(self._path):
                raise ConfigError(
                    f"{key}={location}: {self._where} has no splits, and there is no file or folder of that name. Give "
                    f"a share of the rows (0.1), or a path, such as {location}.jsonl."
                )
            assert self._path is not None
            return open_rows(self._path, f"{key}={location}: path", subset=self._subset, split=location)
        return open_rows(location, key, default_split=None)

    def _checked_keys(self, table: RowTable, prefix: str) -> array[int]:
        """The hash of every row's prompt, in order.

        Raises:
            ConfigError: If one is broken, or two have the same id.
        """
        # A run loads its tasks for the checks, data.json, the evaluations and the stream; a million rows take 25 s.
        form = (self._prompt_field, self._id_field, str(self._columns), self._required, self._system, self._is_chat)
        state = table.state()
        if state is not None and (state, prefix, form) in self._known:
            return self._known[state, prefix, form]
        keys = array("Q")
        known: dict[str, int] = {}
        part = _Part(table, keys, prefix)
        is_system_used = False
        for index, row in enumerate(table):
            task = self._as_task(part, index, row)
            is_system_used |= not isinstance(task.prompt, str) and task.prompt[0]["content"] == self._system
            keys.append(int.from_bytes(row_key({"prompt": task.prompt}), "big"))
            if self._id_field and (other := known.setdefault(task.task_id, index)) != index:
                raise ConfigError(
                    f"env.args.id_field={self._id_field}: {table.where(other)} and {table.where(index)} have the same "
                    f"id, {row[self._id_field]!r}: tasks could not be told apart. Use another column, or null to "
                    "number them."
                )
        if self._system is not None and not is_system_used:
            raise ConfigError(
                f"env.args.system={self._system!r:.80}: all {len(keys)} prompts of {self._where} have a system message "
                "of their own, so it would reach none of them. Remove one of the two."
            )
        if state is not None:
            self._known[state, prefix, form] = keys
        return keys

    def _in_order(self, part: _Part) -> Iterator[Task]:
        is_wanted = bytearray(len(part.table))
        for index in part.indices:
            is_wanted[index] = True
        return (self._as_task(part, index, row) for index, row in enumerate(part.table) if is_wanted[index])

    def _task(self, part: _Part, index: int) -> Task:
        return self._as_task(part, index, part.table[index])

    def _as_task(self, part: _Part, index: int, row: Row) -> Task:
        if is_deep([*row.values()]):
            raise ConfigError(f"env: {part.table.where(index)} cannot be used: {TOO_DEEP}.")
        name = index
        if self._id_field is not None:
            name = self._value(self._id_field, "id_field", part, index, row)
            if not is_unicode(str(name)):
                raise ConfigError(
                    f"env.args.id_field={self._id_field}: {part.table.where(index)} has the id {name!a}, with half of "
                    "a surrogate pair, which no file can hold. Use another column, or null to number the rows."
                )
        # Ids of other files may be those of the training rows.
        task_id = f"{part.prefix}/{name}" if self._id_field is None or part.prefix != "rows" else str(name)
        prompt = self._prompt(self._value(self._prompt_field, "prompt_field", part, index, row), part.table, index)
        taken = {self._prompt_field, *self._columns.values()}
        fields = {key: value for key, value in row.items() if key not in taken and key.isidentifier()}
        for target, column in self._columns.items():
            fields[target] = self._value(column, f"columns.{target}", part, index, row)
        for required in self._required:
            if fields.get(required) is None:
                raise ConfigError(
                    f"env.args.required_fields: {part.table.where(index)} has no {required!r}; it has {sorted(row)}."
                    f"{nearest_hint(required, fields)}{left_out_hint(row)}"
                )
        return Task(TaskId(task_id), prompt, fields, None, part.evaluation_set, part.is_trained_on)

    def _value(self, column: str, key: str, part: _Part, index: int, row: Row) -> Any:
        if column not in row:
            raise ConfigError(
                f"env.args.{key}={column}: {part.table.where(index)} has no column {column!r}; it has {sorted(row)}."
                f"{nearest_hint(column, row)}"
            )
        return row[column]

    def _prompt(self, value: Any, table: RowTable, index: int) -> str | list[Message]:
        """The prompt of a row.

        Raises:
            ConfigError: If it is neither text nor chat messages.
        """
        try:
            return self._text_or_messages(value)
        except MessageError as problem:
            # In one line, also of an array.
            shown = " ".join(f"{value!r:.200}".split())[:80]
            where = f"env.args.prompt_field={self._prompt_field}: {table.where(index)} has the prompt {shown}"
            raise ConfigError(f"{where}: {problem}.") from None

    def _text_or_messages(self, value: Any) -> str | list[Message]:
        messages = messages_in(value) if isinstance(value, str) else value
        if isinstance(messages, np.ndarray):  # as pandas has them
            messages = messages.tolist()
        if isinstance(messages, list) and messages:
            chat = [checked_message(number, message) for number, message in enumerate(messages)]
            return chat if self._system is None else with_system(chat, self._system)
        if not isinstance(value, str) or not value.strip() or not is_unicode(value):
            raise MessageError(
                "expected valid text that is not empty, or a list of chat messages, each with the texts role and "
                "content"
            )
        return with_system([{"role": "user", "content": value}], self._system) if self._is_chat else value


def left_out_hint(row: Row) -> str:
    """How to get at the columns of a row that are no fields, since no argument can have their names."""
    left_out = [column for column in row if not column.isidentifier()]
    example = f" Use env.args.columns={{answer: {left_out[0]!r}}}." if left_out else ""
    return f" {left_out} cannot be names of arguments.{example}" if left_out else ""


def _check_texts(**settings: object) -> None:
    """Raise ConfigError for a setting that is no text."""
    for name, value in settings.items():
        if not isinstance(value, str):
            raise ConfigError(f"env.args.{name}={value!r}, of type {type(value).__name__}: expected a text.")


def _checked_columns(columns: Mapping[str, str]) -> dict[str, str]:
    texts = [*columns, *columns.values()] if isinstance(columns, Mapping) else [None]
    if not all(isinstance(one, str) for one in texts):
        raise ConfigError(f"env.args.columns={columns!r}: expected {{FIELD: COLUMN}}, e.g. {{answer: solution}}.")
    for target in columns:
        if target == "prompt":
            raise ConfigError(f"env.args.columns.prompt={columns[target]}: write prompt_field={columns[target]}.")
        if not target.isidentifier():
            raise ConfigError(f"env.args.columns: a field is an argument of the reward, and {target!r} is no name.")
    return dict(columns)


def _named_sets(held_out: Location | Mapping[str, Location]) -> dict[str, Location]:
    """Name of the evaluation set -> where it is; a single one without a name has an empty one."""
    if not isinstance(held_out, Mapping) or "path" in held_out or "rows" in held_out:
        return {"": held_out}
    wrong = [name for name in held_out if _SET_NAME.fullmatch(str(name)) is None]
    if wrong or not held_out:
        found = f"{wrong[0]!r} is no name" if wrong else "it is empty"
        raise ConfigError(
            f"env.args.held_out={dict(held_out)}: {found}. Evaluation sets are {{NAME: split, path or section}}, and a "
            "name has up to 40 of the characters A-Z a-z 0-9 _ -."
        )
    for name, location in held_out.items():
        if not isinstance(location, str | Sequence | Mapping):
            raise ConfigError(
                f"env.args.held_out.{name}={location!r}: expected a split, a path or a section. A share is given "
                "alone, as held_out=0.1."
            )
    return {str(name): location for name, location in held_out.items()}


def _is_split_name(location: str) -> bool:
    return (
        _SPLIT.fullmatch(location) is not None
        and not location.lower().endswith((*FORMATS, PACKED))
        and not Path(location).expanduser().exists()
    )


def _rows_of(path: str, key: str) -> RowTable:
    if not isinstance(path, str):
        raise ConfigError(f"{key}={path!r}: expected the import path of a function, my_rows:rows.")
    function = load_object(path, key)
    found = function() if callable(function) else function
    if not isinstance(found, Iterable) or isinstance(found, str | Mapping) or hasattr(found, "iloc"):
        raise ConfigError(
            f"{key}={path} gave a {type(found).__name__}; expected a list of dicts (pandas: table.to_dict('records'))."
        )
    # A `datasets.Dataset` stays memory-mapped.
    is_stored = hasattr(found, "__getitem__") and hasattr(found, "__len__")
    rows: Any = found if is_stored else list(found)
    table = TableRows(rows, f"{path}()")
    if not len(table):
        raise ConfigError(f"{key}={path} gave no rows.")
    return table
