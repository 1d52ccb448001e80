"""Parts of `make soak` run every job once, continue where they were stopped, and report failures."""

from __future__ import annotations

import json
import sys

import pytest

from tests.soak import jobs, run_part

COUNT = "import pathlib, sys; path = pathlib.Path(sys.argv[1]); path.write_text(path.read_text() + 'x')"


@pytest.fixture
def counted(tmp_path):
    """Jobs that write what they were run, and the files they write to."""
    files = {name: tmp_path / name for name in ("first", "second", "third")}
    for file in files.values():
        file.write_text("")
    return {name: [sys.executable, "-c", COUNT, str(file)] for name, file in files.items()}, files


def test_parts_share_out_the_jobs_and_what_has_passed_on_a_commit_is_not_run_again(counted, tmp_path) -> None:
    commands, files = counted
    results = tmp_path / "soak.jsonl"
    assert run_part("1/2", commands, "a", results) == []
    assert run_part("1/2", commands, "a", results) == []
    assert [file.read_text() for file in files.values()] == ["x", "", "x"]
    assert run_part("2/2", commands, "a", results) == []
    assert [file.read_text() for file in files.values()] == ["x", "x", "x"]
    assert run_part("1/1", commands, "b", results) == []
    assert run_part("1/1", commands, "b-changed", results) == []
    assert run_part("1/1", commands, "b-changed", results) == []
    assert [file.read_text() for file in files.values()] == ["x" * 4] * 3
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(line["commit"], line["job"], line["passed"]) for line in lines[:3]] == [
        ("a", "first", True),
        ("a", "third", True),
        ("a", "second", True),
    ]


def test_a_failure_is_reported_and_run_again_and_the_others_run_all_the_same(counted, tmp_path) -> None:
    commands, files = counted
    results = tmp_path / "soak.jsonl"
    broken = {"broken": [sys.executable, "-c", "raise SystemExit(3)"], **commands}
    assert run_part("1/1", broken, "a", results) == ["broken"]
    assert run_part("1/1", broken, "a", results) == ["broken"]
    assert [file.read_text() for file in files.values()] == ["x"] * 3


def test_a_part_that_there_is_not_is_refused(tmp_path) -> None:
    with pytest.raises(SystemExit, match="PART=3/2"):
        run_part("3/2", {}, "a", tmp_path / "soak.jsonl")


def test_all_fault_seeds_are_in_some_job() -> None:
    seeds = [name for name in jobs() if name.startswith("fault seeds")]
    assert len(seeds) == 40
    assert "fault seeds 9750:10000" in seeds
