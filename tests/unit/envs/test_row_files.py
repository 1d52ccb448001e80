"""Own rows as a user has them: every format, own evaluation rows, and files that cannot work."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from datetime import date
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.task import Task
from penstock.envs.adapters.rows import RowTasks

ROWS = [{"prompt": f'{n}+1=\nüber, "{n}"', "answer": str(n + 1)} for n in range(100)]
FORMATS = ("a.jsonl", "lines.json", "list.json", "a.csv", "a.tsv", "a.parquet", "saved", "saved_splits", "folder")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, rows: list[dict[str, Any]]) -> str:
    """Write rows in the format that the end of `name` says; returns the path for the configuration."""
    path = Path(name)
    if name.endswith(("jsonl", "lines.json")):
        path.write_text("\n\n".join(map(json.dumps, rows)))
    elif name.endswith("list.json"):
        path.write_text(json.dumps(rows, indent=1))
    elif name.endswith(("csv", "tsv")):
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, rows[0].keys(), delimiter="," if name.endswith("csv") else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith("saved"):
        datasets.Dataset.from_list(rows).save_to_disk(name)
    elif name.endswith("saved_splits"):
        datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(name)
    else:
        path.mkdir()
        write(f"{name}/rows.jsonl", rows)
    return name


def prompts(tasks: list[Task]) -> set[str]:
    return {str(task.prompt) for task in tasks}


def trained(source: RowTasks, num_tasks: int = 300) -> set[str]:
    return prompts(list(islice(source.train(), num_tasks)))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_tasks_in_the_same_order(kind: str) -> None:
    source = RowTasks(5, write(kind, ROWS))
    keys = [
        int.from_bytes(blake2b(json.dumps({"prompt": row["prompt"]}).encode(), digest_size=8).digest(), "big")
        for row in ROWS
    ]
    order = [index for index, key in enumerate(keys) if key % 100 >= 10]
    held_out = [index for index, key in enumerate(keys) if key % 100 < 10]
    assert 0 < len(held_out) < 30
    rng, expected = random.Random("rows/train/5"), []
    for _ in range(2):
        rng.shuffle(order)
        expected += order
    assert [task.task_id for task in islice(source.train(), len(expected))] == [f"rows/{index}" for index in expected]
    assert [task.prompt for task in islice(source.train(), 50)] == [ROWS[index]["prompt"] for index in expected[:50]]
    assert [dict(task.fields) for task in islice(source.train(), 3)] == [
        {"answer": ROWS[index]["answer"]} for index in expected[:3]
    ]
    random.Random("rows/held-out").shuffle(held_out)
    assert [task.task_id for task in source.held_out(len(held_out))] == [f"rows/{index}" for index in held_out]


def test_a_list_and_a_pattern_are_the_rows_of_their_files_in_order(tmp_path: Path) -> None:
    write("b.jsonl", ROWS[:50])
    write("a.csv", ROWS[50:])
    both = RowTasks(0, ["b.jsonl", "a.csv"]).stored()
    assert {task.prompt for part in both.values() for task in part} == {row["prompt"] for row in ROWS}
    assert trained(RowTasks(0, f"{tmp_path}/[ab].*")) == trained(RowTasks(0, ["b.jsonl", "a.csv"]))
    order = {task.task_id: task.prompt for part in RowTasks(0, "*.*").stored().values() for task in part}
    assert order["rows/0"] == ROWS[50]["prompt"], "a pattern is sorted by name"


def tasks_of(path: str, **settings: Any) -> list[Task]:
    """All tasks of a path, in the order of the data."""
    source = RowTasks(0, path, held_out=write("own.jsonl", [{"prompt": "own"}]), **settings)
    return list(source.stored()["train"])


@pytest.mark.parametrize(
    "name", ["rows[1].parquet", "rows?.parquet", "*.parquet", "{a,b}.parquet", "data [v2]/x.parquet"]
)
def test_a_parquet_file_whose_name_looks_like_a_pattern_is_that_file(name: str) -> None:
    for folder in ("data [v2]", "data 2"):
        Path(folder).mkdir()
    for decoy in ("rows1.parquet", "a.parquet", "data 2/x.parquet"):
        write(decoy, [{"prompt": "decoy"}])
    write(name, [{"prompt": "named"}])
    assert [task.prompt for task in tasks_of(name)] == ["named"]
    if "/" in name:
        assert [task.prompt for task in tasks_of("data [v2]")] == ["named"]


def test_a_parquet_file_that_replaces_another_of_the_same_time_is_read() -> None:
    for number in (1, 2):
        write("rows.parquet", [{"prompt": f"question {number}"}])
        os.utime("rows.parquet", (1e9, 1e9))
        assert [task.prompt for task in tasks_of("rows.parquet")] == [f"question {number}"]


TEXTS = ["007", "true", "NA", "null", "1e5", "1.10", "2024-01-01", "12345678901234567890", "[1, 2]", '"quoted"', "x"]


@pytest.mark.parametrize("name", ["rows.jsonl", "list.json", "rows.csv", "rows.tsv"])
def test_rows_of_a_folder_are_those_of_its_files(name: str) -> None:
    Path("data").mkdir()
    write(f"data/{name}", [{"prompt": f"{text} ", "answer": text} for text in TEXTS])
    assert [(task.prompt, task.fields["answer"]) for task in tasks_of("data")] == [(f"{text} ", text) for text in TEXTS]
    if name == "rows.jsonl":
        answers = ["3", 3, 3.5, True, [1], None, 2**60 + 1, "null"]
        write(f"data/{name}", [{"prompt": f"{n}", "answer": answer} for n, answer in enumerate(answers)])
        assert [task.fields["answer"] for task in tasks_of("data")] == answers


def test_splits_of_a_folder_are_chosen_by_the_names_of_files_or_by_its_card() -> None:
    Path("data").mkdir()
    write("data/train-00.jsonl", ROWS[:30])
    write("data/train-01.jsonl", ROWS[30:40])
    write("data/test.csv", ROWS[40:])
    expected = [row["prompt"] for row in ROWS]
    assert [task.prompt for task in tasks_of("data")] == expected[:40]
    assert [task.prompt for task in tasks_of("data", split="test")] == expected[40:]
    parts = tasks_of("data", split="train[28:32]+test[:10%]")
    assert [task.prompt for task in parts] == expected[28:32] + expected[40:46]
    card = (
        "---\nconfigs:\n- config_name: easy\n  data_files: test.csv\n- config_name: hard\n  data_files: train*\n---\n"
    )
    Path("data/README.md").write_text(card)
    assert [task.prompt for task in tasks_of("data", subset="easy")] == expected[40:]
    assert [task.prompt for task in tasks_of("data", subset="hard")] == expected[:40]
    with pytest.raises(ConfigError, match=r"subset=None; set it to one of \['easy', 'hard'\]"):
        tasks_of("data")
    Path("data/README.md").write_text(card.replace("test.csv", 'test.csv\n  sep: ";"'))
    with pytest.raises(ConfigError, match=r"README.md there has \['sep'\] for the subset 'easy'"):
        tasks_of("data", subset="easy")


@pytest.mark.parametrize("kind", ["saved", "rows.parquet"])
def test_a_column_of_mixed_types_that_datasets_keeps_as_json_is_refused_and_objects_are_not(kind: str) -> None:
    def save(rows: list[dict[str, Any]]) -> str:
        found = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
        shutil.rmtree("saved", ignore_errors=True)
        found.save_to_disk("saved") if kind == "saved" else found.to_parquet(kind)
        return kind

    rows = [{"prompt": "a", "answer": "3"}, {"prompt": "b", "answer": 3}]
    with pytest.raises(ConfigError, match=r"row 0 has 3 in the column 'answer', which has values of several types"):
        tasks_of(save(rows))
    notes: list[Any] = [{"a": 1}, ["1"]]
    rows = [{"prompt": str(index), "notes": note} for index, note in enumerate(notes)]
    assert [task.fields["notes"] for task in tasks_of(save(rows))] == notes


def test_short_floats_of_a_table_are_the_numbers_that_were_written() -> None:
    table = pa.table(
        {
            "prompt": ["a"],
            "answer": pa.array([0.1], pa.float32()),
            "numbers": pa.array([[0.1, None, 2.5]], pa.list_(pa.float32())),
            "nested": pa.array([{"x": [0.3]}], pa.struct({"x": pa.list_(pa.float32())})),
            "half": pa.array([0.1], pa.float16()),
        }
    )
    pq.write_table(table, "rows.parquet")
    fields = {"answer": 0.1, "numbers": [0.1, None, 2.5], "nested": {"x": [0.3]}, "half": 0.1}
    assert tasks_of("rows.parquet")[0].fields == fields


def test_held_out_rows_come_from_a_share_a_split_or_a_path() -> None:
    write("train.jsonl", ROWS)
    shares = [len(trained(RowTasks(0, "train.jsonl", held_out=share))) for share in (0.1, 0.5, 0.9)]
    assert shares[0] == len(trained(RowTasks(0, "train.jsonl"))), "a tenth is the default"
    assert 35 <= shares[1] <= 65
    assert 1 <= shares[2] <= 25
    own = [{"prompt": "own", "answer": "?"}, ROWS[7]]
    write("own.csv", own)
    for location in ("own.csv", ["own.csv"], {"path": "own.csv"}):
        source = RowTasks(0, "train.jsonl", held_out=location)
        assert sorted(task.task_id for task in source.held_out(2)) == ["held_out/0", "held_out/1"]
        assert trained(source) == {row["prompt"] for row in ROWS} - {ROWS[7]["prompt"]}
    assert source.held_out(3) == source.held_out(2)
    splits = {"train": ROWS[:60], "test": ROWS[60:]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk("both")
    source = RowTasks(0, "both", held_out="test")
    assert trained(source) == {row["prompt"] for row in ROWS[:60]}
    assert prompts(source.held_out(40)) == {row["prompt"] for row in ROWS[60:]}
    other = RowTasks(0, "train.jsonl", held_out={"path": "both", "split": "test"})
    assert prompts(other.held_out(40)) == {row["prompt"] for row in ROWS[60:]}


def test_several_evaluation_sets_take_turns_and_their_tasks_carry_their_names() -> None:
    write("train.jsonl", ROWS)
    write("easy.csv", [{"prompt": f"easy {n}"} for n in range(10)])
    write("hard.jsonl", [{"prompt": f"hard {n}"} for n in range(3)])
    source = RowTasks(0, "train.jsonl", held_out={"easy": "easy.csv", "hard": ["hard.jsonl"]})
    assert [task.evaluation_set for task in source.held_out(8)] == ["easy", "hard"] * 3 + ["easy"] * 2
    assert all(str(task.prompt).startswith(task.evaluation_set) for task in source.held_out(13))
    assert len({task.task_id for task in source.held_out(13)}) == 13
    assert list(source.stored()) == ["train", "held_out/easy", "held_out/hard"]
    assert {next(source.train()).evaluation_set} == {""}


def test_columns_are_renamed_and_ids_of_evaluation_rows_never_meet_those_of_training_rows() -> None:
    rows = [{"No.": n, "Final Answer": f"{n}", "question": f"{n}?", "note": "x"} for n in range(40)]
    write("rows.csv", rows)
    write("own.csv", [row | {"question": f"own {row['question']}"} for row in rows])
    source = RowTasks(
        0, "rows.csv", held_out="own.csv", prompt_field="question", id_field="No.", columns={"answer": "Final Answer"}
    )
    task = next(source.train())
    assert task.fields == {"answer": task.task_id, "note": "x"}, "a column that is no name is left out"
    assert {one.task_id for one in source.held_out(40)} == {f"held_out/{n}" for n in range(40)}


@pytest.mark.parametrize("kind", ["a.jsonl", "a.csv", "a.parquet", "saved", "folder"])
def test_rows_are_checked_once_and_again_when_their_file_or_the_arguments_have_changed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    as_task = RowTasks._as_task
    monkeypatch.setattr(RowTasks, "_as_task", lambda *args: read.append(args[2]) or as_task(*args))
    path = write(kind, ROWS)
    for settings, num_read in (({}, 101), ({}, 1), ({"chat": True}, 101), ({"held_out": 0.5}, 1)):
        read.clear()
        next(RowTasks(0, path, **settings).train())
        assert len(read) == num_read, settings
    if kind == "saved":
        shutil.rmtree(kind)
    write(f"{kind}/rows.jsonl" if kind == "folder" else kind, ROWS[:50])
    read.clear()
    next(RowTasks(0, path).train())
    assert len(read) == 51


@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet", "saved"])
def test_chat_messages_are_prompts_and_empty_columns_of_a_message_are_left_out(kind: str) -> None:
    chat = [{"role": "system", "content": "Add.", "name": None}, {"role": "user", "content": "1+1", "name": "Ada"}]
    source = RowTasks(0, write(kind, [{"prompt": chat}]), held_out=write("own.jsonl", [{"prompt": "own"}]))
    assert next(source.train()).prompt == [{"role": "system", "content": "Add."}, chat[1]]


CALLS = [
    {
        "prompt": [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
            {"role": "tool", "content": "3", **extra},
        ],
        "answer": str(n),
        "notes": {"of": {name: n}, "list": [None, {"only": n}]} if n % 2 else {},
    }
    for n, (name, arguments, extra) in enumerate(
        [("add", {"a": 1, "b": {"c": 2}}, {"name": "add"}), ("search", {"query": "x", "in": [{"site": "y"}, {}]}, {})]
        * 6
    )
]
"""Rows whose nested keys differ, as those of tool calls do."""


@pytest.mark.parametrize("kind", ["calls.parquet", "saved", "function"])
def test_keys_that_only_other_rows_have_are_in_no_row_however_deep(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tasks(**where: Any) -> dict[str, Task]:
        return {task.task_id: task for tasks in RowTasks(0, **where).stored().values() for task in tasks}

    expected = tasks(path=write("own.jsonl", CALLS))
    if kind == "function":
        Path("own_calls.py").write_text(
            "import datasets, json\n\ndef rows():\n    with open('own.jsonl') as file:\n"
            "        return datasets.Dataset.from_list([json.loads(line) for line in file if line.strip()])\n"
        )
        monkeypatch.syspath_prepend(".")
        found = tasks(rows="own_calls:rows")
    else:
        found = tasks(path=write(kind, CALLS))
    assert found == expected
    assert found["rows/1"].prompt[1]["tool_calls"] == CALLS[1]["prompt"][1]["tool_calls"]  # type: ignore[index,call-overload]
    assert found["rows/0"].fields["notes"] == {}


def test_a_null_that_a_row_of_text_has_below_a_message_or_in_a_field_stays() -> None:
    call = {"function": {"name": "search", "arguments": {"query": None}}}
    row = {"prompt": [{"role": "assistant", "content": None, "tool_calls": [call]}], "limits": {"time": None}}
    write("own.jsonl", [{"prompt": "own"}])
    task = next(RowTasks(0, write("rows.jsonl", [row]), held_out="own.jsonl").train())
    assert task.prompt == [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert task.fields == {"limits": {"time": None}}


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_messages_in_the_form_of_openai_become_those_that_templates_take(kind: str) -> None:
    arguments = {"city": "Zürich"}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": json.dumps(arguments)}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1", "tool_calls": []},
    ]
    if kind == "rows.parquet":  # one type of content in a table
        chat[2]["content"] = [{"type": "text", "text": "rain"}]
    rows = [{"prompt": json.dumps(chat) if kind == "rows.csv" else chat}]
    source = RowTasks(0, write(kind, rows), held_out=write("own.jsonl", [{"prompt": "own"}]), chat=True)
    assert next(source.train()).prompt == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]


def test_text_that_only_looks_like_messages_stays_text() -> None:
    texts = ['["role", "content"]', "[role] content", '[{"name": "role content"}]', "[1, 2]"]
    rows = RowTasks(0, write("rows.jsonl", [{"prompt": text} for text in texts]), held_out=write("own.csv", ROWS))
    assert {task.prompt for task in islice(rows.train(), 4)} == set(texts)


def test_a_system_text_stands_before_every_prompt_that_has_none_or_is_refused() -> None:
    user, own = {"role": "user", "content": "1+1"}, {"role": "system", "content": "Own."}
    write("own.jsonl", [{"prompt": "own"}])
    write("rows.jsonl", [{"prompt": [user]}, {"prompt": [own, user]}, {"prompt": "text"}])
    source = RowTasks(0, "rows.jsonl", held_out="own.jsonl", system="Be brief.")
    told = {"role": "system", "content": "Be brief."}
    assert {task.task_id: task.prompt for task in islice(source.train(), 3)} == {
        "rows/0": [told, user],
        "rows/1": [own, user],
        "rows/2": [told, {"role": "user", "content": "text"}],
    }
    assert source.held_out(1)[0].prompt == [told, {"role": "user", "content": "own"}]
    write("rows.jsonl", [{"prompt": [own, user]}] * 3)
    with pytest.raises(ConfigError, match=r"system='Be brief\.': all 3 prompts .* have a system message of their own"):
        next(RowTasks(0, "rows.jsonl", held_out="own.jsonl", system="Be brief.").train())


@pytest.mark.parametrize(
    "name", ["a.JSONL", "LIST.JSON", "a.Csv", "a.jsonl.gz", "list.json.gz", "a.csv.GZ", "a.tsv.gz"]
)
def test_endings_may_be_capitals_and_text_formats_may_be_packed(name: str) -> None:
    plain = write(f"plain-{name.lower().removesuffix('.gz')}", ROWS)
    content = Path(plain).read_bytes()
    Path(plain).unlink()
    Path(name).write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
    source = RowTasks(5, name)
    assert trained(source) | prompts(source.held_out(100)) == {row["prompt"] for row in ROWS}
    assert next(source.train()) == next(RowTasks(5, write("again.jsonl", ROWS)).train())


def test_white_space_around_the_names_of_columns_is_left_out() -> None:
    Path("rows.csv").write_text("prompt, answer \n1+1=, 2\n")
    source = RowTasks(0, "rows.csv", held_out=write("own.jsonl", [{"prompt": "own"}]))
    assert next(source.train()).fields == {"answer": " 2"}


def test_rows_are_read_from_the_file_when_they_are_asked_for() -> None:
    source = RowTasks(0, write("rows.jsonl", ROWS))
    tasks = source.train()
    next(tasks)
    write("rows.jsonl", ROWS[:99])
    with pytest.raises(ConfigError, match=r"rows\.jsonl has changed while it was in use"):
        next(tasks)


def bad_bytes(name: str, content: bytes) -> Callable[[], str]:
    def make() -> str:
        Path(name).write_bytes(content)
        return name

    return make


GOOD = b'{"prompt": "1", "answer": "1"}\n'
BROKEN: dict[str, tuple[Callable[[], str], str]] = {
    "missing": (
        lambda: write("rows.jsonl", ROWS) and "rowz.jsonl",
        "rowz.jsonl: no such file.*Did you mean 'rows.jsonl'",
    ),
    "missing folder": (lambda: "data/set/rows", "no such file or folder"),
    "folder in a folder": (lambda: Path("data").mkdir() or "data/rows", "data/rows: no such file or folder"),
    "home": (lambda: "~/no_such_rows.csv", "no such file"),
    "pattern": (lambda: "part-*.jsonl", r"part-\*.jsonl: no file matches"),
    "empty folder": (lambda: Path("none").mkdir() or "none", "none is a folder without rows"),
    "two formats": (
        lambda: Path("data").mkdir() or (write("data/a.jsonl", ROWS) and write("data/b.csv", ROWS) and "data"),
        r"the split 'train' has files of several formats, a.jsonl and b.csv",
    ),
    "another packing": (
        lambda: (
            Path("data").mkdir() or (write("data/a.jsonl", ROWS) and bad_bytes("data/b.jsonl.zst", b"x")() and "data")
        ),
        r"several formats, a.jsonl and b.jsonl.zst",
    ),
    "splits in capitals": (
        lambda: Path("data").mkdir() or (write("data/TRAIN.jsonl", ROWS) and write("data/TEST.jsonl", ROWS) and "data"),
        r"TEST.jsonl seems to be of a split, and only names in small letters",
    ),
    "address": (
        lambda: write("a.parquet", ROWS) and bad_bytes("a.parquet::b.parquet", b"x" * 9)(),
        "'::' as part of an",
    ),
    "empty": (bad_bytes("rows.csv", b""), "rows.csv is empty"),
    "blank": (bad_bytes("rows.jsonl", b"\n \n"), "rows.jsonl has no rows"),
    "header only": (bad_bytes("rows.csv", b"prompt,answer\n"), "rows.csv has no rows"),
    "other format": (bad_bytes("rows.txt", b"1\n"), r"a file of rows is one of \.jsonl"),
    "no json": (bad_bytes("rows.jsonl", GOOD + b"\n{oops\n"), r"rows.jsonl, line 3 is not JSON: .* at character 2$"),
    "cut off": (bad_bytes("rows.jsonl", GOOD * 3 + GOOD[:17]), r"rows.jsonl, line 4 is not JSON"),
    "no object": (bad_bytes("rows.jsonl", GOOD + b"[1]\n"), r"rows.jsonl, line 2 is a list; expected a dict"),
    "no object in a list": (bad_bytes("rows.json", b"[1]"), r"rows.json, row 0 is a int"),
    "deep": (
        bad_bytes("rows.jsonl", GOOD + b"[" * 100_000),
        r"rows.jsonl, line 2 is not JSON: it is nested too deeply",
    ),
    "deep list": (bad_bytes("rows.json", b"[" * 100_000), r"rows.json is not JSON: it is nested too deeply"),
    "deep field": (
        bad_bytes("rows.jsonl", GOOD + b'{"prompt": "1", "answer": %s1%s}' % (b'{"a": [' * 300, b"]}" * 300)),
        r"rows.jsonl, line 2 cannot be used: it is nested deeper than 64 levels",
    ),
    "deep field in a list": (
        bad_bytes("rows.json", b'[{"prompt": "1"},{"prompt": "2", "x": %s}]' % (b"[" * 80 + b"]" * 80)),
        r"rows.json, row 1 cannot be used: it is nested deeper than 64 levels",
    ),
    "deep arguments": (
        bad_bytes(
            "rows.jsonl",
            b'{"prompt": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "%s"}}]}]}'
            % (b"[" * 600 + b"]" * 600),
        ),
        r"line 1 .* calls 'f' with arguments that cannot be used: it is nested deeper than 64 levels",
    ),
    "deep messages as text": (
        bad_bytes(
            "rows.tsv",
            b"prompt\n[{'role': 'user', 'content': '1', 'x': %s}]\n".replace(b"'", b'"') % (b"[" * 600 + b"]" * 600),
        ),
        r"rows.tsv, line 2 .*nested deeper than 64 levels",
    ),
    "latin-1": (bad_bytes("rows.jsonl", GOOD + '{"prompt": "ü"}'.encode("latin-1")), "line 2 is not UTF-8: byte 0xfc"),
    "latin-1 csv": (bad_bytes("rows.csv", "prompt\na\nü\n".encode("latin-1")), "rows.csv, line 3 is not UTF-8"),
    "utf-16": (bad_bytes("rows.jsonl", GOOD.decode().encode("utf-16")), "rows.jsonl is UTF-16. Save it as UTF-8"),
    "utf-16 without a mark": (
        bad_bytes("rows.json", f"[{GOOD.decode()}]".encode("utf-16-le")),
        "rows.json has zero bytes, as UTF-16 has",
    ),
    "gzip without its ending": (bad_bytes("rows.jsonl", gzip.compress(GOOD)), "packed by gzip.*the ending .gz"),
    "zip": (bad_bytes("rows.json", b"PK\x03\x04\x14\0\x08\xff"), "rows.json is a zip archive. Unpack it"),
    "parquet without its ending": (
        lambda: write("rows.parquet", ROWS) and Path("rows.parquet").rename("rows.csv").name,
        "rows.csv is a Parquet file",
    ),
    "list in lines": (bad_bytes("rows.jsonl", b"[\n" + GOOD + b"]"), "line 1 is not JSON: a row has one line here"),
    "semicolons": (bad_bytes("rows.csv", b"prompt;answer\n1;1\n"), "line 1: the columns seem to be separated by ';'"),
    "bars": (bad_bytes("rows.tsv", b"prompt|answer\n1|1\n"), r"line 1: the columns seem to be separated by '\|'"),
    "old line ends": (bad_bytes("rows.csv", b"prompt,answer\r1,1\r"), r"a line ends with \\r alone"),
    "zeros": (bad_bytes("rows.jsonl", b"\0" * 64), "rows.jsonl has zero bytes"),
    "ragged": (bad_bytes("rows.csv", b"prompt,answer\n1,2\n\n3\n"), "rows.csv, line 4 has 1 values.* 2 columns"),
    "open quote": (bad_bytes("rows.csv", b'prompt\n1\n"2\n3\n'), "the row at line 3 is broken: unexpected end of data"),
    "twice": (bad_bytes("rows.csv", b"prompt,prompt\n1,2\n"), "has the column 'prompt' twice"),
    "nameless": (bad_bytes("rows.csv", b"prompt,\n1,2\n"), "has a column without a name"),
    "wrong column": (bad_bytes("rows.csv", b"promt\n1\n"), "line 2 has no column 'prompt'; .*Did you mean 'promt'"),
    "empty prompt": (bad_bytes("rows.csv", b"prompt,answer\n1,1\n,2\n"), "rows.csv, line 3 has the prompt ''"),
    "null prompt": (bad_bytes("rows.jsonl", GOOD + b'{"prompt": null}'), "line 2 has the prompt None"),
    "number": (bad_bytes("rows.jsonl", b'{"prompt": 3}'), "line 1 has the prompt 3: expected valid text"),
    "half a pair": (bad_bytes("rows.jsonl", b'{"prompt": "\\ud800"}'), "line 1 has the prompt .*expected valid text"),
    "half a pair in a role": (
        bad_bytes("rows.jsonl", GOOD + b'{"prompt": [{"role": "u\\ud800", "content": "1"}]}'),
        r"line 2 .*message 0 \('u\\ud800'\) has half of a surrogate pair in role",
    ),
    "half a pair in a name": (
        bad_bytes("rows.jsonl", GOOD + b'{"prompt": [{"role": "user", "name": ["\\ud800"], "content": "1"}]}'),
        r"line 2 .*message 0 \('user'\) has half of a surrogate pair in name",
    ),
    "date in a message": (
        lambda: write("rows.parquet", [{"prompt": [{"role": "user", "content": "1", "at": date(2024, 1, 1)}]}]),
        r"rows.parquet, row 0 .*message 0 \(user\) has the key 'at' of type date, which no chat template takes",
    ),
    "no role": (bad_bytes("rows.jsonl", b'{"prompt": [{"content": "1"}]}'), "line 1 has the prompt .*role and content"),
    "no parquet": (bad_bytes("rows.parquet", GOOD), "rows.parquet is no Parquet file"),
    "cut parquet": (lambda: cut(write("rows.parquet", ROWS)), "rows.parquet is no Parquet file"),
    "damaged parquet": (lambda: damage(write("rows.parquet", ROWS)), "rows.parquet cannot be read"),
    "damaged folder": (lambda: damage(write("saved", ROWS) + "/state.json") and "saved", "saved cannot be loaded"),
    "wrapped": (
        bad_bytes("rows.json", b'{"data": [\n{"prompt": "1"}]}'),
        r"is one JSON object with the keys \['data'\].*Save each list as a file: data.json with the 1 rows",
    ),
    "wrapped in one line": (
        bad_bytes("rows.json", b'{"data": [{"prompt": "1"}], "meta": {}}'),
        r"is one JSON object .*Save each list as a file: data.json with the 1 rows",
    ),
    "columns in one line": (
        bad_bytes("rows.json", b'{"prompt": {"0": "1", "1": "2"}, "answer": {"0": "1", "1": "2"}}'),
        "Its values are columns: write an object for each row",
    ),
    "bad text in a table": (
        lambda: raw_parquet(pa.array([b"1", b"\xe9"]).cast(pa.string(), safe=False)),
        r"rows.parquet, row 1, column 'answer', cannot be read: UnicodeDecodeError",
    ),
    "far date in a table": (
        lambda: raw_parquet(pa.array([1, 2**60], pa.timestamp("us"))),
        r"rows.parquet, row 1, column 'answer', cannot be read",
    ),
    "splits in an object": (
        bad_bytes("rows.json", b'{"train": [{"prompt": "1"}],\n"test": [{"prompt": "2"}]}'),
        "train.json with the 1 rows of 'train', test.json",
    ),
    "columns": (
        bad_bytes("rows.json", b'{\n"prompt": ["1"], "answer": ["1"]}'),
        "Its values are columns: write an object",
    ),
    "no gzip": (bad_bytes("rows.jsonl.gz", GOOD), "rows.jsonl.gz cannot be unpacked: Not a gzipped file"),
    "cut gzip": (bad_bytes("rows.csv.gz", gzip.compress(GOOD)[:-9]), "rows.csv.gz cannot be unpacked: "),
    "packed parquet": (bad_bytes("rows.parquet.gz", b"x"), "may be packed, as .jsonl.gz"),
    "second message": (
        bad_bytes("rows.jsonl", b'{"prompt": [{"role": "user", "content": "%s"}, {"role": "tool"}]}' % (b"1" * 200)),
        r"message 1 \(tool\) has no content and no tool_calls",
    ),
    "image": (
        bad_bytes("rows.jsonl", b'{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}'),
        r"message 0 \(user\) has a part of type 'image_url' in its content; only parts of text",
    ),
    "sharegpt": (
        bad_bytes("rows.jsonl", b'{"prompt": [{"from": "human", "value": "1"}]}'),
        "of ShareGPT: from is role",
    ),
    "arguments": (
        bad_bytes(
            "rows.jsonl",
            b'{"prompt": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
        ),
        "calls 'f' with arguments that are not JSON",
    ),
    "messages of Python": (
        bad_bytes("rows.csv", b"prompt\n\"[{'role': 'user', 'content': '1'}]\"\n"),
        "seems to be chat messages that were written as text",
    ),
    "sharegpt as text": (
        bad_bytes("rows.jsonl", b"{\"prompt\": \"[{'from': 'human'}, {'value': 1}]\"}"),
        "seems to be chat",
    ),
    "link": (lambda: Path("rows.jsonl").symlink_to("gone") or "rows.jsonl", "rows.jsonl: no such file"),
    "device": (lambda: "/dev/null", "a file of rows is one of"),
}


def raw_parquet(answers: pa.Array) -> str:
    pq.write_table(pa.table({"prompt": [str(n) for n in range(len(answers))], "answer": answers}), "rows.parquet")
    return "rows.parquet"


def cut(name: str) -> str:
    content = Path(name).read_bytes()
    Path(name).write_bytes(content[: len(content) // 2])
    return name


def damage(name: str) -> str:
    content = bytearray(Path(name).read_bytes())
    content[4:40] = b"\xff" * 36
    Path(name).write_bytes(content)
    return name


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_is_named_with_its_place(kind: str) -> None:
    make, message = BROKEN[kind]
    path = make()
    write("good.jsonl", ROWS)
    with pytest.raises(ConfigError, match=message):
        next(RowTasks(0, path).train())
    with pytest.raises(ConfigError, match=message):
        RowTasks(0, "good.jsonl", held_out={"path": path}).held_out(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "test"}, "split=test was asked for, but files have no splits.*held_out=test.jsonl"),
        ({"split": "train"}, "files have no splits: all rows would be used. Leave it out.$"),
        ({"subset": "main"}, "files have no subsets"),
        ({"path": "saved", "subset": "main"}, "folders of save_to_disk have none. Set it to null"),
        ({"held_out": "test"}, "held_out=test: rows.jsonl has no splits"),
        ({"held_out": "tset.jsonl"}, "held_out=tset.jsonl: no such file"),
        ({"held_out": 1}, "held_out=1: a share is above 0 and below 1"),
        ({"held_out": 0.0}, "a share is above 0"),
        ({"held_out": True}, "a share is above 0"),
        ({"held_out": float("nan")}, "a share is above 0"),
        ({"held_out": {}}, "it is empty"),
        ({"held_out": {"a/b": "rows.jsonl"}}, "'a/b' is no name"),
        ({"held_out": {"easy": 0.1}}, r"held_out\.easy=0\.1: expected a split, a path or a section"),
        ({"held_out": {"easy": {"path": "rows.jsonl", "spilt": "x"}}}, r"held_out\.easy=.*Did you mean 'split'"),
        ({"held_out": {"easy": "rowz.jsonl"}}, r"held_out\.easy=rowz\.jsonl: no such file"),
        (
            {"held_out": "rows.jsonl"},
            "all 100 rows of rows.jsonl are held out.*held_out=train evaluates on the training",
        ),
        ({"columns": {"answer": "anser"}}, r"columns\.answer=anser: .*line 1 has no column 'anser'.*'answer'"),
        ({"columns": {"prompt": "answer"}}, "write prompt_field=answer"),
        ({"columns": {"a b": "answer"}}, "'a b' is no name"),
        ({"path": "ids.jsonl", "id_field": "id"}, r"line 3 has the id 'b\\ud83d', with half of a surrogate pair"),
        ({"required_fields": ["anser"]}, "line 1 has no 'anser'.*Did you mean 'answer'"),
        (
            {"required_fields": ["answr"], "path": "spaces.jsonl"},
            r"\[' answer'\] cannot be names.*columns={answer: ' answer'}",
        ),
        ({"prompt_field": 0}, "prompt_field=0, of type int: expected a text"),
        ({"prompt_field": None}, "prompt_field=None, of type NoneType: expected a text"),
        ({"prompt_field": ["prompt"]}, "of type list: expected a text"),
        ({"id_field": 0}, "id_field=0, of type int: expected a text"),
        ({"system": 5}, "system=5, of type int: expected a text"),
        ({"chat": "false"}, "chat='false': expected true or false"),
        ({"columns": {5: "answer"}}, r"columns={5: 'answer'}: expected {FIELD: COLUMN}"),
        ({"required_fields": "answer"}, r"required_fields='answer': expected a list, \[answer\]"),
        ({"held_out": {"rows": 5}}, r"held_out\.rows=5: expected the import path of a function"),
        ({"path": []}, "expected a path"),
        ({"path": 3}, "expected a path"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], message: str) -> None:
    write("rows.jsonl", ROWS)
    write("saved", ROWS)
    write("spaces.jsonl", [{"prompt": "1", " answer": "2"}])
    write("ids.jsonl", [{"prompt": "1", "id": "a"}, {"prompt": "2", "id": "b\ud83d"}])
    with pytest.raises(ConfigError, match=message):
        next(RowTasks(0, **{"path": "rows.jsonl"} | settings).train())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("[{'prompt': '1', 5: 2}]", r"given\(\), row 0 has the column 5, of type int; names are text"),
        ("pandas.DataFrame([{'prompt': '1'}])", r"gave a DataFrame; expected a list of dicts .*to_dict"),
        ("5", "gave a int; expected a list of dicts"),
        ("[{'prompt': numpy.arange(40).reshape(4, 10)}]", r"has the prompt array\(.*: message 0 is .*, of type list"),
        ("datasets.Dataset.from_list(ROWS).with_format('pandas')", ""),
        ("datasets.Dataset.from_list(ROWS).to_iterable_dataset()", ""),
        ("tuple(ROWS)", ""),
        ("[{'prompt': numpy.array([{'role': 'user', 'content': 'prompt'}]), 'answer': '1'}]", ""),
    ],
)
def test_a_function_gives_rows_of_many_kinds_or_is_refused(
    found: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import datasets, numpy, pandas\n\nROWS = [{'prompt': 'prompt', 'answer': '1'}]\n\ndef given():\n"
    Path("many_kinds.py").write_text(f"{code}    return {found}\n")
    monkeypatch.syspath_prepend(".")
    monkeypatch.delitem(sys.modules, "many_kinds", raising=False)
    source = RowTasks(0, rows="many_kinds:given", held_out=write("own.jsonl", [{"prompt": "own"}]))
    if message:
        with pytest.raises(ConfigError, match=message):
            next(source.train())
    else:
        task = next(source.train())
        assert task.fields == {"answer": "1"}
        assert task.prompt in ("prompt", [{"role": "user", "content": "prompt"}])


def test_blank_lines_may_be_before_the_header() -> None:
    Path("rows.csv").write_text("\n\nprompt,answer\n1+1=,2\n")
    source = RowTasks(0, "rows.csv", held_out=write("own.jsonl", [{"prompt": "own"}]))
    task = next(source.train())
    assert (task.fields, source.where(task)) == ({"answer": "2"}, "rows.csv, line 4")


def test_no_test_split_is_trained_on_unless_the_user_says_what_is_held_out() -> None:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(test=rows).save_to_disk("only_test")
    datasets.DatasetDict(train=rows, test=rows).save_to_disk("both")
    datasets.Dataset.from_list(ROWS, split="test").save_to_disk("one_test")
    Path("files").mkdir()
    write("files/test.jsonl", ROWS)
    refusals = {
        "only_test": "has no split 'train'; only_test has the splits \\['test'\\]",
        "one_test": "one_test holds the split 'test', which is not trained on",
        "files": "has no split 'train'; files has the splits \\['test'\\]",
    }
    for path, message in refusals.items():
        with pytest.raises(ConfigError, match=message):
            next(RowTasks(0, path).train())
        with pytest.raises(ConfigError, match="To evaluate on test, write held_out=test instead"):
            next(RowTasks(0, path, split="test").train())
        assert trained(RowTasks(0, path, split="test", held_out=0.1))
    with pytest.raises(
        ConfigError, match=re.escape("held_out=tset: path=both has no split 'tset'; both has the splits")
    ):
        next(RowTasks(0, "both", held_out="tset").train())
    with pytest.raises(ConfigError, match=r"both has the splits \['test', 'train'\]. Name one"):
        next(RowTasks(0, "files/test.jsonl", held_out={"path": "both"}).train())
