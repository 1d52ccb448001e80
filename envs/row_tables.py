"""Tables of rows, each row read when it is asked for.

No table is held in memory. Of a text file, the byte and the line where each row begins are kept, 16 bytes per row; a
packed one is unpacked into a temporary file. Parquet files and datasets are memory-mapped by `datasets`. So every row
can be reached in any order, and a training stream shuffles all rows, however many there are.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import shutil
import tempfile
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np

from penstock.dataflow.errors import ConfigError

Row = Mapping[str, Any]

PACKED = ".gz"
"""May follow the ending of a text format."""
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_BATCH = 1000
_NO_TEXT = {
    b"\x1f\x8b": "is packed by gzip. Give its name the ending .gz",
    b"PK\x03\x04": "is a zip archive. Unpack it",
    b"PAR1\x15": "is a Parquet file. Give its name the ending .parquet",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "is UTF-16. Save it as UTF-8"),
}
"""First bytes of files that are no text in UTF-8 -> what to do."""
_SEPARATORS = ",;|\t"
_UTF8_MARK = b"\xef\xbb\xbf"
_SHORT_FLOATS = ("float16", "float32")
_INEXACT = re.compile(rf"'({'|'.join(_SHORT_FLOATS)})'|Json\(")
"""In the description of a column of a dataset whose values are others than those that were written."""
csv.field_size_limit(1 << 27)  # the default, 128 KiB, is below a long document


class RowTable(Protocol):
    """Rows that are read by index. Reading raises ConfigError, with the place, for a row that is broken."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]: ...

    def where(self, index: int) -> str:
        """The place of a row, for messages."""
        ...

    def state(self) -> Hashable:
        """Equal for equal rows, by the states of their files; None if they are in no file."""
        ...


class TextRows:
    """Rows of a JSONL, CSV or TSV file. All values of CSV and TSV are text."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        self._starts, self._lines = array("Q"), array("Q")
        self._delimiter = _DELIMITERS.get(format_of(path))
        self._header: list[str] = []
        self._unpacked: IO[bytes] | None = None
        if path.suffix.lower() == PACKED:
            with self._opened() as file:
                self._state = file_state(os.fstat(file.fileno()))
                self._unpacked = _unpacked(file, f"{key}={path}")
        with self._opened() as file:
            if self._unpacked is None:
                self._state = file_state(os.fstat(file.fileno()))
            head = file.read(64)
            what = next((what for mark, what in _NO_TEXT.items() if head.startswith(mark)), None)
            if what is None and b"\0" in head:
                what = "has zero bytes, as UTF-16 has. Save it as UTF-8"
            if what is not None:
                raise ConfigError(f"{key}={path} {what}.")
            file.seek(len(_UTF8_MARK) if head.startswith(_UTF8_MARK) else 0)
            if self._delimiter is None:
                self._scan_json(file)
            else:
                self._scan_csv(file, self._delimiter)
            self._size = file.tell()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        with self._opened() as file:
            # Without the time of the last change of its permissions or links.
            if self._unpacked is None and file_state(os.fstat(file.fileno()))[:3] != self._state[:3]:
                raise ConfigError(f"{self._key}={self._path} has changed while it was in use: start the run again.")
            return self._read(file, index)

    def __iter__(self) -> Iterator[Row]:
        with self._opened() as file:
            for index in range(len(self)):
                yield self._read(file, index)

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index]}"

    def state(self) -> Hashable:
        return self._path, self._state

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        path = self._path if self._unpacked is None else Path(self._unpacked.name)
        try:
            with path.open("rb") as file:
                yield file
        except OSError as error:
            raise ConfigError(f"{self._key}={self._path} cannot be read: {error.strerror}.") from error

    def _scan_json(self, file: Any) -> None:
        position = file.tell()
        for number, line in enumerate(file, start=1):
            if line.strip():
                self._starts.append(position)
                self._lines.append(number)
            position += len(line)

    def _scan_csv(self, file: Any, delimiter: str) -> None:
        position = file.tell()

        def lines() -> Iterator[str]:
            nonlocal position
            for number, line in enumerate(file, start=1):
                position += len(line)
                yield self._decoded(line, number)

        reader = csv.reader(lines(), delimiter=delimiter, strict=True)
        number = 1
        try:
            self._header = [name.strip() for name in next(filter(None, reader), [])]
            begin, number = position, reader.line_num + 1
            for values in reader:
                if values:
                    self._starts.append(begin)
                    self._lines.append(number)
                begin, number = position, reader.line_num + 1
        except csv.Error as error:
            # The library means its own arguments.
            cause = "a line ends with \\r alone; save it with \\n" if "new-line" in str(error) else error
            raise ConfigError(f"{self._key}={self._path}: the row at line {number} is broken: {cause}.") from error
        others = [one for one in _SEPARATORS if one != delimiter and one in "".join(self._header)]
        if len(self._header) == 1 and others:
            raise ConfigError(
                f"{self._key}={self._path}, line 1: the columns seem to be separated by {others[0]!r}; a .csv file has "
                "commas, and a .tsv file has tabs. Save it so."
            )
        wrong = [name for name in self._header if not name or self._header.count(name) > 1]
        if wrong:
            what = f"the column {wrong[0]!r} twice" if wrong[0] else "a column without a name"
            raise ConfigError(f"{self._key}={self._path}, line 1: the header {self._header} has {what}.")

    def _read(self, file: Any, index: int) -> Row:
        end = self._starts[index + 1] if index + 1 < len(self) else self._size
        file.seek(self._starts[index])
        text = self._decoded(file.read(end - self._starts[index]), self._lines[index])
        if self._delimiter is not None:
            lines = io.StringIO(text, newline="\n")  # as the scan: a line ends at its line feed
            values = next(filter(None, csv.reader(lines, delimiter=self._delimiter, strict=True)))
            if len(values) != len(self._header):
                raise ConfigError(
                    f"{self._key}={self.where(index)} has {len(values)} values, and the header has "
                    f"{len(self._header)} columns: {self._header}. Text with a comma or a line break has to be in "
                    'quotes ("...").'
                )
            return dict(zip(self._header, values, strict=True))
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            # The library's own message counts lines within the row.
            cause = f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            if isinstance(error, RecursionError):
                cause = "it is nested too deeply"
            elif text.strip() in ("[", "{", "[{"):
                cause = "a row has one line here. Save it so, or a list of rows as .json"
            raise ConfigError(f"{self._key}={self.where(index)} is not JSON: {cause}") from error
        return _checked(row, self, index)

    def _decoded(self, line: bytes, number: int) -> str:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self._key}={self._path}, line {number + line.count(10, 0, error.start)} is not UTF-8: byte "
                f"0x{line[error.start]:02x} ({error.reason}). Save the file as UTF-8."
            ) from error


class TableRows:
    """Rows of a list or of a memory-mapped dataset.

    A table has one schema for all rows: a key below a column that any row has exists in every row, as null. Such nulls
    are left out, however deep, so that a row has the keys that it had before it was saved; columns stay.
    """

    def __init__(self, rows: Sequence[Row], name: str) -> None:
        self._name = name
        self._is_dataset = hasattr(rows, "features")
        # In Python's types, whatever the user's function has set.
        self._rows: Any = cast("Any", rows).with_format(None) if self._is_dataset else rows
        # Most columns have none.
        features = getattr(rows, "features", None) or {}
        self._inexact = {column: feature for column, feature in features.items() if _INEXACT.search(str(feature))}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        try:
            row = self._rows[index]
        except Exception as error:  # the library raises whatever its parts raise
            raise ConfigError(
                f"env: {self.where(index)}{self._broken_column(index)} cannot be read: {first_cause(error)}"
            ) from error
        return self._read(row, index) if self._is_dataset else _checked(row, self, index)

    def __iter__(self) -> Iterator[Row]:
        if not self._is_dataset:
            yield from (_checked(row, self, index) for index, row in enumerate(self._rows))
            return
        for start in range(0, len(self), _BATCH):  # rows one by one take five times as long
            try:
                batch = self._rows[start : start + _BATCH]
            except Exception:  # noqa: BLE001 - one by one, the broken row is found
                yield from (self[index] for index in range(start, min(start + _BATCH, len(self))))
                continue
            for index, values in enumerate(zip(*batch.values(), strict=True), start):
                yield self._read(dict(zip(batch, values, strict=True)), index)

    def where(self, index: int) -> str:
        return f"{self._name}, row {index}"

    def state(self) -> Hashable:
        files = [Path(file["filename"]) for file in getattr(self._rows, "cache_files", [])]
        return (self._name, *((file, file_state(file.stat())) for file in files)) if files else None

    def _read(self, row: Row, index: int) -> Row:
        """A row of a dataset with the values that were written into it."""
        read = _without_nulls(row)
        for column, feature in self._inexact.items():
            try:
                read[column] = _written(read[column], feature)
            except _UnknownTypeError as unknown:
                raise ConfigError(
                    f"env: {self.where(index)} has {unknown} in the column {column!r}, which has values of several "
                    "types: `datasets` keeps them as JSON, so it is unknown whether it was text. Save the column as "
                    "text, or the rows as JSONL."
                ) from None
        return read

    def _broken_column(self, index: int) -> str:
        for column in getattr(self._rows, "column_names", []):
            try:
                self._rows.select_columns([column])[index]
            except Exception:  # noqa: BLE001 - it is the column that is looked for
                return f", column {column!r},"
        return ""


class _UnknownTypeError(Exception):
    """A value of which it is not known whether it was text."""


def _written(value: Any, feature: Any) -> Any:
    """A value of a dataset as it was written: the shortest number of a short float, and JSON if it is no text.

    Raises:
        _UnknownTypeError: For JSON that may be text, "3" for the text 3 as for the number.
    """
    if value is None:
        return None
    if isinstance(feature, dict):
        return {key: _written(part, feature[key]) for key, part in value.items()}
    if (inner := getattr(feature, "feature", None)) is not None:
        return [_written(part, inner) for part in value]
    if type(feature).__name__ == "Json":
        if not isinstance(value, dict | list):
            raise _UnknownTypeError(f"{value!r:.80}")
        return value
    dtype = getattr(feature, "dtype", "")
    return np.asarray(value, dtype).astype(str).astype(float).tolist() if dtype in _SHORT_FLOATS else value


class Concatenation:
    """The rows of several tables, one after the other."""

    def __init__(self, parts: Sequence[RowTable]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, within = self._place(index)
        return self._parts[part][within]

    def __iter__(self) -> Iterator[Row]:
        return (row for part in self._parts for row in part)

    def where(self, index: int) -> str:
        part, within = self._place(index)
        return self._parts[part].where(within)

    def state(self) -> Hashable:
        states = tuple(part.state() for part in self._parts)
        return None if None in states else states

    def _place(self, index: int) -> tuple[int, int]:
        part = bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)


class Slice:
    """Consecutive rows of a table."""

    def __init__(self, table: RowTable, rows: range) -> None:
        self._table = table
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._table[self._rows[index]]

    def __iter__(self) -> Iterator[Row]:
        return islice(self._table, self._rows.start, self._rows.stop)

    def where(self, index: int) -> str:
        return self._table.where(self._rows[index])

    def state(self) -> Hashable:
        state = self._table.state()
        return None if state is None else (state, self._rows)


def _checked(row: Any, table: RowTable, index: int) -> Row:
    """Return `row` if it is a dict.

    Raises:
        ConfigError: Otherwise.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"env: {table.where(index)} is a {type(row).__name__}; expected a dict, a value for each column."
            + (" A list of rows is read from a file that ends with .json." if isinstance(row, list) else "")
        )
    if wrong := [name for name in row if not isinstance(name, str)]:
        raise ConfigError(
            f"env: {table.where(index)} has the column {wrong[0]!r}, of type {type(wrong[0]).__name__}; names are text."
        )
    return row


def _without_nulls(row: Row) -> dict[str, Any]:
    """The row without nulls below its columns; items of lists stay."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(part) for key, part in value.items() if part is not None}
        return [bare(part) for part in value] if isinstance(value, list) else value

    return {column: bare(value) for column, value in row.items()}


def format_of(file: Path) -> str:
    """The ending that says how a file is read, in small letters; of a packed file the one before `.gz`."""
    name = file.name.lower()
    return Path(name.removesuffix(PACKED)).suffix if name.endswith(PACKED) else file.suffix.lower()


def _unpacked(packed: IO[bytes], where: str) -> IO[bytes]:
    """The content of a packed file as a temporary one, which is deleted with the object."""
    unpacked = tempfile.NamedTemporaryFile(prefix="penstock-rows-")  # noqa: SIM115 - it is open as long as its rows are
    try:
        with gzip.open(packed) as content:
            shutil.copyfileobj(content, unpacked)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{where} cannot be unpacked: {error}.") from error
    unpacked.flush()
    return cast("IO[bytes]", unpacked)


def file_state(status: os.stat_result) -> tuple[int, ...]:
    """Changes with the content of a file, even where its time is set back, as by `cp -p`."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def first_cause(error: BaseException) -> str:
    """The first cause: `datasets` wraps the error of a file in one that does not name it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
