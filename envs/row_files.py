"""Rows of files, `save_to_disk` folders and Hugging Face datasets, each read when it is asked for.

No table is held in memory. Of a text file, the byte and the line where each row begins are kept, 16 bytes per row;
Parquet files and datasets are memory-mapped by `datasets`. So every row can be reached in any order, and a training
stream shuffles all rows, however many there are. Endings may be capitals.

| source | read by | where a row is, in messages |
|---|---|---|
| `.jsonl`, `.csv`, `.tsv`; `.json` (a list, or one object per line) | this module | file and line, from 1 |
| the same, packed: `.jsonl.gz` and so on | this module, unpacked into a temporary file | file and line, from 1 |
| `.parquet` | `datasets`, converted to Arrow in its cache | file and row, from 0 |
| folder of such files | as they are read alone; the split of a file is by the rules of `datasets` | as of its files |
| folder of `save_to_disk`, name on the hub | `datasets` | folder or name, split, and row, from 0 |
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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape, glob, has_magic
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np

from penstock.dataflow.errors import ConfigError
from penstock.envs.import_path import nearest_hint

Row = Mapping[str, Any]

TEXT_FORMATS = (".jsonl", ".json", ".csv", ".tsv")
FORMATS = (*TEXT_FORMATS, ".parquet")
PACKED = ".gz"
"""May follow the ending of a text format."""
EVALUATION_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
"""Names of splits that are never trained on unless the user says what is held out instead."""
_OTHER_FORMATS = (".txt", ".arrow", PACKED, ".zst", ".bz2", ".xz", ".zip", ".tar", ".xlsx", ".pkl", ".npy", ".yaml")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_BATCH = 1000
_NO_TEXT = {
    b"\x1f\x8b": "is packed by gzip. Give its name the ending .gz",
    b"PK\x03\x04": "is a zip archive. Unpack it",
    b"PAR1\x15": "is a Parquet file. Give its name the ending .parquet",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "is UTF-16. Save it as UTF-8"),
}
"""First bytes of files that are no text in UTF-8 -> what to do."""
_SEPARATORS = ",;|\t"
_SHORT_FLOATS = ("float16", "float32")
_INEXACT = re.compile(rf"'({'|'.join(_SHORT_FLOATS)})'|Json\(")
"""In the description of a column of a dataset whose values are others than those that were written."""
_BETWEEN_WORDS = re.compile(r"[^a-z]+")
_UTF8_MARK = b"\xef\xbb\xbf"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
csv.field_size_limit(1 << 27)  # the default, 128 KiB, is below a long document


class NotDownloadedError(ConfigError):
    """A dataset of the hub is not in the local cache, so a dry run, which uses no network, cannot read it."""


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


def open_rows(
    path: str | Sequence[str],
    key: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    default_split: str | None = "train",
) -> RowTable:
    """Open the rows at `path`; text files are scanned once for the beginnings of their rows.

    Args:
        path: A file, a glob pattern, a folder, or the name of a dataset on the hub; or a list of them.
        key: Configuration key of `path`, for messages.
        subset: Configuration of a dataset of the hub.
        split: Split of a dataset; files have none.
        default_split: The split if `split` is None. None: the only one that the dataset has.

    Raises:
        NotDownloadedError: If a dataset of the hub is not in the cache, and cannot be downloaded.
        ConfigError: If something is missing or cannot be read.
    """
    places: list[str] = [path] if isinstance(path, str) or not isinstance(path, Sequence) else list(path)
    if not places or not all(isinstance(place, str) and place for place in places):
        raise ConfigError(f"{key}={path!r}: expected a path, or a list of paths.")
    parts: list[RowTable] = []
    for place in places:
        files = _files_at(place, key)
        if files is None:
            parts.append(_dataset(place, key, subset, split, default_split))
            continue
        for name, value in (("split", split), ("subset", subset)):
            if value is not None:
                raise ConfigError(
                    f"{key}={place}: {name}={value} was asked for, but files have no {name}s: all rows would be used. "
                    "Leave it out"
                    + (
                        "."
                        if value == "train"
                        else f"; rows for evaluation are held_out={value}.jsonl, or a share, 0.1."
                    )
                )
        parts += [_file(file, key) for file in files]
    if not any(map(len, parts)):
        raise ConfigError(f"{key}={path} has no rows.")
    return parts[0] if len(parts) == 1 else Concatenation(parts)


def has_splits(path: str | Sequence[str] | None) -> bool:
    """Whether `path` is a dataset, which may have splits, instead of files."""
    if not isinstance(path, str):
        return False
    place = Path(path).expanduser()
    return place.is_dir() or not (place.exists() or _is_local(path))


class TextRows:
    """Rows of a JSONL, CSV or TSV file. All values of CSV and TSV are text."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        self._starts, self._lines = array("Q"), array("Q")
        self._delimiter = _DELIMITERS.get(_format(path))
        self._header: list[str] = []
        self._unpacked: IO[bytes] | None = None
        if path.suffix.lower() == PACKED:
            with self._opened() as file:
                self._state = _state(os.fstat(file.fileno()))
                self._unpacked = _unpacked(file, f"{key}={path}")
        with self._opened() as file:
            if self._unpacked is None:
                self._state = _state(os.fstat(file.fileno()))
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
            if self._unpacked is None and _state(os.fstat(file.fileno()))[:3] != self._state[:3]:
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
                f"env: {self.where(index)}{self._broken_column(index)} cannot be read: {_cause(error)}"
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
        return (self._name, *((file, _state(file.stat())) for file in files)) if files else None

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


def _format(file: Path) -> str:
    """The ending that says how a file is read, in small letters; of a packed file the one before `.gz`."""
    name = file.name.lower()
    return Path(name.removesuffix(PACKED)).suffix if name.endswith(PACKED) else file.suffix.lower()


def _is_known(file: Path) -> bool:
    return _format(file) in (TEXT_FORMATS if file.suffix.lower() == PACKED else FORMATS)


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


def _files_at(place: str, key: str) -> list[Path] | None:
    """The files at a place; None if it is a folder or the name of a dataset.

    Raises:
        ConfigError: If there is no such file, or one of another format.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        return None
    files = [path]
    if not path.exists():
        if not _is_local(place):
            return None
        if not has_magic(place):
            names = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
            hint = nearest_hint(path.name, names)
            raise ConfigError(f"{key}={place}: no such file or folder (looked in {Path.cwd()}).{hint}")
        files = sorted(Path(one) for one in glob(str(path), recursive=True) if Path(one).is_file())  # noqa: PTH207 - also absolute
        if not files:
            raise ConfigError(f"{key}={place}: no file matches (looked in {Path.cwd()}).")
    return files


def _is_local(place: str) -> bool:
    """Whether something that does not exist was meant to be a file, and not a dataset of the hub."""
    first = place.partition("/")[0]
    return (
        has_magic(place)
        or _HUB_NAME.fullmatch(place) is None
        or place.lower().endswith((*FORMATS, *_OTHER_FORMATS))
        or ("/" in place and Path(first).is_dir())
    )


def _checked_format(file: Path, key: str) -> str:
    """The format of a file of rows.

    Raises:
        ConfigError: If it is none, or is empty.
    """
    if not _is_known(file):
        raise ConfigError(
            f"{key}={file}: a file of rows is one of {', '.join(FORMATS)}; all but the last may be packed, as "
            f"{TEXT_FORMATS[0]}{PACKED}. Convert or unpack it."
        )
    if not file.is_file():
        raise ConfigError(f"{key}={file} is not a regular file.")
    if file.stat().st_size == 0:
        raise ConfigError(f"{key}={file} is empty: it has no rows.")
    return _format(file)


def _file(file: Path, key: str) -> RowTable:
    return _parquet([file], str(file), key) if _checked_format(file, key) == ".parquet" else _text(file, key)


def _text(file: Path, key: str) -> RowTable:
    if _format(file) == ".json":
        try:
            with (gzip.open if file.suffix.lower() == PACKED else open)(file, "rb") as opened:
                content = opened.read().decode("utf-8-sig")
        except UnicodeDecodeError:
            return TextRows(file, key)  # which names the line
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{key}={file} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
        if "\0" in content[:64]:
            return TextRows(file, key)  # which says what it is
        is_list, is_object = (content.lstrip().startswith(mark) for mark in "[{")
        try:
            parsed: Any = json.loads(content) if is_list or is_object else None
        except (ValueError, RecursionError) as error:
            if is_list:
                cause = "it is nested too deeply" if isinstance(error, RecursionError) else error
                raise ConfigError(f"{key}={file} is not JSON: {cause}") from error
            return TextRows(file, key)  # an object in each line
        if is_list:
            return TableRows(parsed, str(file))
        if is_object and ("\n" in content.strip() or not _is_row(parsed)):
            raise ConfigError(f"{key}={file} {_one_object(parsed)}")
    return TextRows(file, key)


def _is_row(found: Mapping[str, Any]) -> bool:
    """Whether the only object of a file can be a row: it has a value that is no table, such as text or messages."""

    def is_table(value: Any) -> bool:
        first = value[0] if isinstance(value, list) and value else value
        return isinstance(value, list | dict) and not (isinstance(first, dict) and {"role", "from"} & first.keys())

    return not all(map(is_table, found.values()))


def _one_object(found: Mapping[str, Any]) -> str:
    """What is wrong with a file that is one JSON object over several lines, and what to do."""
    inner = {name: value for name, value in found.items() if isinstance(value, list) and value}
    rows = [name for name, value in inner.items() if isinstance(value[0], dict)]
    what = f"is one JSON object with the keys {list(found)[:8]}; expected a list of rows, or one row per line."
    if rows:
        each = ", ".join(f"{name}.json with the {len(inner[name])} rows of {name!r}" for name in rows[:4])
        return f"{what} Save each list as a file: {each}."
    if all(isinstance(value, list | dict) for value in found.values()):
        return f"{what} Its values are columns: write an object for each row (pandas: orient='records', lines=True)."
    return what


def _parquet(files: Sequence[Path], name: str, key: str) -> RowTable:
    """The rows of Parquet files as one table with that name."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets.data_files import DataFilesList

    paths = [str(file.absolute()) for file in files]
    if linked := [path for path in paths if "::" in path]:
        raise ConfigError(f"{key}={linked[0]}: `datasets` reads '::' as part of an address. Use another name.")
    for file in files:
        try:
            pq.read_metadata(file)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{key}={file} is no Parquet file: {error}") from error
    # A list of this type is taken as it is. Other names are patterns, and the cache knows a file by its time alone.
    states = [tuple(map(str, _state(file.stat()))) for file in files]
    try:
        with _quiet():
            found = datasets.Dataset.from_parquet({"train": DataFilesList(paths, states)}, split="train")
    except Exception as error:  # the library raises whatever its parts raise
        raise ConfigError(f"{key}={name} cannot be read: {_cause(error)}") from error
    return TableRows(found, name)


def _dataset(place: str, key: str, subset: str | None, split: str | None, default_split: str | None) -> RowTable:
    """A folder, or a dataset of the hub."""
    import datasets

    folder = Path(place).expanduser()
    name = place if subset is None else f"{place} ({subset})"
    is_saved = any((folder / written).is_file() for written in ("dataset_dict.json", "state.json"))
    if is_saved and subset is not None:
        raise ConfigError(f"{key}={place}: subset={subset}, and folders of save_to_disk have none. Set it to null.")
    if folder.is_dir() and not is_saved:
        return _folder(folder, name, key, subset, split or default_split)
    found: Any
    wanted = split or default_split
    try:
        if (folder / "dataset_dict.json").is_file():
            found = datasets.DatasetDict.load_from_disk(str(folder))
        elif is_saved:
            return _saved_table(datasets.Dataset.load_from_disk(str(folder)), place, key, split, default_split)
        else:
            found = datasets.load_dataset(place, subset, split=wanted)
            if wanted is not None:
                return TableRows(found, f"{name}, split {wanted}")
    except ConfigError:
        raise
    except Exception as error:  # the library raises whatever its parts raise
        raise _load_error(error, name, f"{key}={name}", wanted, is_local=folder.is_dir()) from error
    return _of_split(found, lambda one: TableRows(found[one], f"{name}, split {one}"), wanted, name, key)


def _folder(folder: Path, name: str, key: str, subset: str | None, wanted: str | None) -> RowTable:
    """A folder of data files."""

    def opened(split: str) -> RowTable:
        files = splits[split]
        if {_checked_format(file, key) for file in files} == {".parquet"}:
            return _parquet(files, f"{name}, split {split}", key)
        parts = [_file(file, key) for file in files]
        return parts[0] if len(parts) == 1 else Concatenation(parts)

    splits = _files_by_split(folder, key, subset)
    return _of_split(splits, opened, wanted, name, key)


def _of_split(
    splits: Mapping[str, Any], opened: Callable[[str], RowTable], wanted: str | None, name: str, key: str
) -> RowTable:
    """The rows of a split, `train`, or of parts of splits, `train[:10%]+test`; None is the only one.

    Raises:
        ConfigError: If there is none of that name, or several and none is named.
    """
    import datasets

    has = f"{name} has the splits {sorted(splits)}"
    if wanted is None:
        if len(splits) > 1:
            raise ConfigError(f"{key}: {has}. Name one: {{path: {name}, split: {min(splits)}}}.")
        wanted = next(iter(splits))
    names = dict.fromkeys(part.partition("[")[0].strip() for part in wanted.split("+"))
    for split in names:
        if split not in splits:
            raise ConfigError(f"{key}={name} has no split {split!r}; {has}.{nearest_hint(split, splits)}")
    tables = {split: opened(split) for split in names}
    if wanted in tables:
        return tables[wanted]
    try:
        parts = datasets.ReadInstruction.from_spec(wanted).to_absolute({one: len(tables[one]) for one in tables})
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{key}={name}: split={wanted} cannot be read: {error}") from error
    return Concatenation([Slice(tables[part.splitname], range(part.from_, part.to)) for part in parts])


def _files_by_split(folder: Path, key: str, subset: str | None) -> dict[str, list[Path]]:
    """Name of a split -> its files of rows, by the rules of `datasets` for names of files and for README.md.

    Raises:
        ConfigError: If there are none, or it is unclear which are meant.
    """
    from datasets.data_files import DEFAULT_PATTERNS_ALL, SPLIT_KEYWORDS, DataFilesDict, get_data_patterns

    # In two levels, since a walk through a large tree takes too long.
    if not any(_is_known(file) for pattern in ("*", "*/*") for file in folder.glob(pattern)):
        raise ConfigError(
            f"{key}={folder} is a folder without rows: neither written by save_to_disk (dataset_dict.json, "
            f"state.json), nor with a file of {', '.join(FORMATS)}."
        )
    own = folder.resolve()
    base = escape(own.as_posix())
    try:
        patterns = _patterns_of_card(folder, key, subset) or get_data_patterns(base)
        found = DataFilesDict.from_patterns(patterns, base_path=base)
    except ConfigError:
        raise
    except Exception as error:  # the library raises whatever its parts raise
        raise ConfigError(f"{key}={folder} cannot be read: {_cause(error)}") from error
    splits: dict[str, list[Path]] = {}
    for split, paths in found.items():
        names = [os.path.relpath(path, own) for path in dict.fromkeys(paths)]
        # Also those in a packing that is not read, so that none is left out without a word.
        names = [name for name in names if any(ending.lower() in FORMATS for ending in Path(name).suffixes)]
        formats = {_format(Path(name)): name for name in reversed(names)}
        if len(formats) > 1:
            first, second, *_ = formats.values()
            raise ConfigError(
                f"{key}={folder}: the split {str(split)!r} has files of several formats, {second} and {first}; only "
                f"one of them may be meant. Name the files: {key}=[{folder / second},{folder / first}]."
            )
        if names:
            splits[str(split)] = [folder / name for name in names]
    words = {word for words in SPLIT_KEYWORDS.values() for word in words}
    for file in splits.get("train", []) if patterns == DEFAULT_PATTERNS_ALL and len(found["train"]) > 1 else []:
        if words & set(_BETWEEN_WORDS.split(os.path.relpath(file, folder).lower())):
            raise ConfigError(
                f"{key}={folder}: {file.name} seems to be of a split, and only names in small letters are. Rename it, "
                f"or name the files: {key}={file}."
            )
    if not splits:
        raise ConfigError(f"{key}={folder}: no file is one of rows by the rules of `datasets` for names of files.")
    return splits


def _patterns_of_card(folder: Path, key: str, subset: str | None) -> dict[str, list[str]] | None:
    """Name of a split -> patterns of its files, as a README.md in the folder has them; None if it has none.

    Raises:
        ConfigError: If it has no such subset, or more about them than the files.
    """
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    card = folder / "README.md"
    subsets = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data) if card.is_file() else {}
    if not subsets and subset is None:
        return None
    chosen = subset or subsets.get_default_config_name()  # type: ignore[union-attr]
    if chosen not in subsets:
        which = "null" if not subsets else f"one of {sorted(subsets)}, which README.md there has"
        raise ConfigError(f"{key}={folder}: subset={subset}; set it to {which}.")
    settings = {name: value for name, value in subsets[chosen].items() if name not in ("default", "data_files")}
    if settings:
        raise ConfigError(
            f"{key}={folder}: README.md there has {sorted(settings)} for the subset {chosen!r}, which would have no "
            "effect: rows are read by the endings of their files. Remove it, or name the files."
        )
    patterns = subsets[chosen].get("data_files")
    return None if patterns is None else sanitize_patterns(patterns)


def _saved_table(table: Any, place: str, key: str, split: str | None, default_split: str | None) -> RowTable:
    """A folder of `Dataset.save_to_disk`, which holds one split."""
    own = None if table.split is None else str(table.split)
    if split is not None and split != own:
        holds = "no splits" if own is None else f"only the split {own!r}"
        raise ConfigError(f"{key}={place}: split={split} was asked for, and the folder has {holds}.")
    if split is None and default_split == "train" and own in EVALUATION_SPLITS:
        raise ConfigError(
            f"{key}={place} holds the split {own!r}, which is not trained on unless split={own} and held_out say so."
        )
    return TableRows(table, place)


def _load_error(error: Exception, name: str, where: str, split: str | None, *, is_local: bool) -> ConfigError:
    cause = _cause(error)
    if is_local or (isinstance(error, ValueError) and "find cache" not in str(error)):
        return ConfigError(f"{where} cannot be loaded: {cause}")
    of_split = "it" if split is None else f"split {split!r} of {name}"
    if os.environ.get("HF_DATASETS_OFFLINE") == "1":
        return NotDownloadedError(
            f"{where}: no such file or folder, and {of_split} is not in the local cache, and the network was not used "
            "(HF_DATASETS_OFFLINE=1; a dry run never uses it)."
        )
    return NotDownloadedError(
        f"{where}: no such file or folder, and {of_split} is not in the local cache and cannot be downloaded "
        f"({cause}). Without a network, load it once elsewhere and copy HF_DATASETS_CACHE, or save it with "
        "save_to_disk and give the path of that folder."
    )


def _cause(error: BaseException) -> str:
    """The first cause: `datasets` wraps the error of a file in one that does not name it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


def _state(status: os.stat_result) -> tuple[int, ...]:
    """Changes with the content of a file, even where its time is set back, as by `cp -p`."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars: the conversion of a local file is no download."""
    import datasets

    was_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not was_off:
            datasets.enable_progress_bars()
