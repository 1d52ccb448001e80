"""`penstock sweep` with real runs: a grid, and the same command again."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import run_cli
from tests.small_run import small_run_overrides

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "sweep" / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_runs_its_grid_and_the_same_command_runs_only_what_is_missing(tmp_path: Path) -> None:
    base = small_run_overrides(tmp_path, "unused", character_tokenizer(), "total_steps=2")
    overrides = [override for override in base if not override.startswith("name=")]
    first = run_cli("sweep", *overrides, "dataflow.max_staleness=0,1", "seeds=0", cwd=tmp_path, timeout_s=400)
    assert first.returncode == 0, first.stdout + first.stderr
    found = rows(tmp_path)
    assert [(row["dataflow.max_staleness"], row["status"]) for row in found] == [("0", "completed"), ("1", "completed")]
    assert float(found[0]["max_staleness"]) == 0.0
    assert all(0.0 <= float(row["accuracy"]) <= 1.0 for row in found)
    summaries = [Path(tmp_path, row["run_dir"], "summary.json") for row in found]
    written = [summary.stat().st_mtime_ns for summary in summaries]

    again = run_cli("sweep", *overrides, "dataflow.max_staleness=0,1", "seeds=0:2", cwd=tmp_path, timeout_s=400)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [row["seed"] for row in rows(tmp_path)] == ["0", "0", "1", "1"]
    assert [summary.stat().st_mtime_ns for summary in summaries] == written, "completed runs are not run again"
    assert again.stdout.count(": running") == 2
