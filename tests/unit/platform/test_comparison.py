"""Runs side by side: differing keys, results, and runs that have not ended."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from penstock.platform.cli.main import app
from penstock.platform.metrics.comparison import compare
from penstock.platform.metrics.run_record import read_run
from penstock.platform.metrics.trackers.jsonl import JsonlTracker

SUMMARY = {
    "status": "completed",
    "steps": 5,
    "eval_before": 0.4,
    "eval_after": 0.9,
    "eval_reward_before": 0.5,
    "eval_reward_after": 0.95,
    "wall_s": 10.0,
    "tokens_trained": 5000,
}


def made_run(folder: Path, config: str, summary: dict[str, object] | None) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    tracker = JsonlTracker(folder)
    for step in range(1, 4):
        tracker.log(step, {"reward/mean": 0.1 * step, "staleness/mean_versions": 1.0})
    tracker.close()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_only_differing_keys_are_shown_and_a_run_that_goes_on_has_gaps(tmp_path: Path) -> None:
    first = made_run(tmp_path / "a", "name: a\nseed: 0\ntrainer: {optimizer: {lr: 0.1}, x: {}}\n", SUMMARY)
    second = made_run(tmp_path / "b", "name: b\nseed: 0\ntrainer: {optimizer: {lr: 0.2}}\nmodel: {path: m}\n", None)
    results, keys = compare([read_run(first), read_run(second)])
    assert keys == [
        ["model.path", "–", '"m"'],
        ["trainer.optimizer.lr", "0.1", "0.2"],
        ["trainer.x", "{}", "–"],
    ]
    told = {name: cells for name, *cells in results}
    assert told["status"] == ["completed", "incomplete"]
    assert told["steps"] == ["5", "3"]
    assert told["accuracy"] == ["40.0% → 90.0%", "–"]
    assert told["reward on these tasks"] == ["0.500 → 0.950", "–"]
    assert told["trained tokens per second"] == ["500", "–"]
    assert told["mean staleness, last 10 steps"] == ["1.00", "1.00"]
    assert "peak memory" not in told, "measured in neither"


def test_a_run_with_one_evaluation_shows_it(tmp_path: Path) -> None:
    at_end_only = {**SUMMARY, "eval_before": None, "eval_reward_before": None}
    interrupted = {**SUMMARY, "status": "interrupted", "eval_after": None, "eval_reward_after": None}
    runs = [made_run(tmp_path / name, "", one) for name, one in (("a", at_end_only), ("b", interrupted))]
    results, _ = compare([read_run(run) for run in runs])
    told = {name: cells for name, *cells in results}
    assert told["accuracy"] == ["– → 90.0%", "40.0% → –"]
    assert told["reward on these tasks"] == ["– → 0.950", "0.500 → –"]


def test_a_run_that_has_logged_nothing_yet_has_gaps(tmp_path: Path) -> None:
    first = made_run(tmp_path / "a", "name: a\n", SUMMARY)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_text("name: b\n")
    results, _ = compare([read_run(first), read_run(tmp_path / "b")])
    told = {name: cells for name, *cells in results}
    assert told["steps"] == ["5", "–"]


def test_the_command_keeps_whole_keys_in_a_narrow_terminal(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, f"a_long_section: {{and_a_long_key: [{name}]}}\n", None) for name in "ab"]
    result = CliRunner().invoke(app, ["compare", *map(str, runs)], env={"COLUMNS": "50"})
    assert result.exit_code == 0, result.output
    assert "a_long_section.and_a_long_key" in result.output


def test_one_run_and_a_folder_that_is_no_run_are_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", "seed: 0\n", None)
    assert CliRunner().invoke(app, ["compare", str(run)]).exit_code == 2
    result = CliRunner().invoke(app, ["compare", str(run), str(tmp_path / "absent")])
    assert result.exit_code != 0
    assert "absent: no such directory" in result.stderr
