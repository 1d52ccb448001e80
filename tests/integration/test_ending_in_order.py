"""A run that `max_hours` ends, and the reports that are made while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.platform.run import training
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import read_summary
from tests.in_process import train_in_process
from tests.small_run import small_run_overrides


@pytest.mark.full
def test_a_run_ends_after_max_hours_and_its_report_is_made_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "REPORT_S", 0.2)
    monkeypatch.setattr(training, "REPORT_PAUSE", 0.0)
    steps_at_report: list[int] = []
    write_report = training.write_report

    def counted(run_dir: Path) -> None:
        metrics = run_dir / "metrics.jsonl"
        steps_at_report.append(metrics.read_text().count('"reward/mean"') if metrics.exists() else 0)
        write_report(run_dir)

    monkeypatch.setattr(training, "write_report", counted)
    overrides = small_run_overrides(tmp_path, "short", character_tokenizer(), "max_hours=0.006", "total_steps=100000")
    train_in_process(tmp_path, overrides)  # it ends with 0
    summary = read_summary(tmp_path / "runs" / "short")
    assert (summary["status"], summary["ended_by"]) == ("interrupted", "max_hours=0.006")
    assert 0 < summary["steps"] == summary["policy_version"] < 100000
    assert "max_hours=0.006: the run ends after this step" in capsys.readouterr().out
    assert len(steps_at_report) > 3, "at the start, again and again, and at the end"
    assert steps_at_report[0] == 0
    assert steps_at_report[-1] == summary["steps"]
