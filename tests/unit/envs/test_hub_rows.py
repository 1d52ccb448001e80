"""Rows of a Hugging Face dataset: a local folder replaces the hub."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.envs.adapters.rows import RowTasks
from penstock.envs.row_files import NotDownloadedError

pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "data"
    data.mkdir()
    for split, start in (("train", 0), ("test", 1000)):
        rows = [{"question": f"{n}+1=", "answer": str(n + 1), "key": f"q{n}"} for n in range(start, start + 60)]
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return data


def test_every_column_but_the_prompt_is_a_field_and_a_split_is_chosen_by_name(folder: Path) -> None:
    source = RowTasks(0, str(folder), prompt_field="question", id_field="key")
    tasks = {task.task_id: task for part in source.stored().values() for task in part}
    assert len(tasks) == 60
    assert tasks["q7"].prompt == "7+1="  # type: ignore[index]
    assert tasks["q7"].fields == {"answer": "8", "key": "q7"}  # type: ignore[index]
    train = {task.task_id for task in islice(source.train(), 200)}
    held_out = {task.task_id for task in source.held_out(60 - len(train))}
    assert train | held_out == set(tasks)
    assert not train & held_out
    test = RowTasks(0, str(folder), split="test", held_out=0.5, prompt_field="question", id_field="key")
    found = {task.task_id for part in test.stored().values() for task in part}
    assert found == {f"q{n}" for n in range(1000, 1060)}


def test_a_dataset_or_split_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="absent: no such file or folder"):
        RowTasks(0, str(folder / "absent")).held_out(1)
    with pytest.raises(ConfigError, match=r"has no split 'dev'; .* has the splits \['test', 'train'\]"):
        RowTasks(0, str(folder), split="dev", held_out=0.1).held_out(1)
    with pytest.raises(NotDownloadedError, match="split 'train' of org/absent is not in the local cache"):
        RowTasks(0, "org/absent").held_out(1)
    with pytest.raises(ConfigError, match=r"train.jsonl, line 1 has no column 'prompt'"):
        RowTasks(0, str(folder)).held_out(1)
