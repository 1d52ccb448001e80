"""Opens rows: files, `save_to_disk` folders and Hugging Face datasets, found by what the user wrote.

What is opened is a table of row_tables.py, which reads each row when it is asked for. Endings may be capitals.

| source | read by | where a row is, in messages |
|---|---|---|
| `.jsonl`, `.csv`, `.tsv`; `.json` (a list, or one object per line) | `TextRows` | file and line, from 1 |
| the same, packed: `.jsonl.gz` and so on | `TextRows`, unpacked into a temporary file | file and line, from 1 |
| `.parquet` | `datasets`, converted to Arrow in its cache | file and row, from 0 |
| folder of such files | as they are read alone; the split of a file is by the rules of `datasets` | as of its files |
| folder of `save_to_disk`, name on the hub | `datasets` | folder or name, split, and row, from 0 |
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape, glob, has_magic
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import ConfigError
from penstock.envs.import_path import nearest_hint
from penstock.envs.row_tables import (
    PACKED,
    Concatenation,
    RowTable,
    Slice,
    TableRows,
    TextRows,
    file_state,
    first_cause,
    format_of,
)

TEXT_FORMATS = (".jsonl", ".json", ".csv", ".tsv")
FORMATS = (*TEXT_FORMATS, ".parquet")
EVALUATION_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
"""Names of splits that are never trained on unless the user says what is held out instead."""
_OTHER_FORMATS = (".txt", ".arrow", PACKED, ".zst", ".bz2", ".xz", ".zip", ".tar", ".xlsx", ".pkl", ".npy", ".yaml")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_BETWEEN_WORDS = re.compile(r"[^a-z]+")


class NotDownloadedError(ConfigError):
    """A dataset of the hub is not in the local cache, so a dry run, which uses no network, cannot read it."""


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


def _is_known(file: Path) -> bool:
    return format_of(file) in (TEXT_FORMATS if file.suffix.lower() == PACKED else FORMATS)


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
    return format_of(file)


def _file(file: Path, key: str) -> RowTable:
    return _parquet([file], str(file), key) if _checked_format(file, key) == ".parquet" else _text(file, key)


def _text(file: Path, key: str) -> RowTable:
    if format_of(file) == ".json":
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
    states = [tuple(map(str, file_state(file.stat()))) for file in files]
    try:
        with _quiet():
            found = datasets.Dataset.from_parquet({"train": DataFilesList(paths, states)}, split="train")
    except Exception as error:  # the library raises whatever its parts raise
        raise ConfigError(f"{key}={name} cannot be read: {first_cause(error)}") from error
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
        raise ConfigError(f"{key}={folder} cannot be read: {first_cause(error)}") from error
    splits: dict[str, list[Path]] = {}
    for split, paths in found.items():
        names = [os.path.relpath(path, own) for path in dict.fromkeys(paths)]
        # Also those in a packing that is not read, so that none is left out without a word.
        names = [name for name in names if any(ending.lower() in FORMATS for ending in Path(name).suffixes)]
        formats = {format_of(Path(name)): name for name in reversed(names)}
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
    cause = first_cause(error)
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
