"""The example of a tracker of the user's, with the real SwanLab, offline."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.platform.metrics.trackers.base import BackgroundTracker
from penstock.platform.metrics.trackers.build import build_trackers
from penstock.platform.metrics.trackers.config import FactoryTrackerConfig, TrackerConfig

pytest.importorskip("swanlab", reason="SwanLab is not installed: it needs protobuf < 7, and the locks have 7")


def test_swanlab_gets_every_step_and_a_resumed_run_has_the_same_id(tmp_path: Path, caplog) -> None:
    own = FactoryTrackerConfig(factory="swanlab_tracker:open_run", args={"project": "rivers"})
    for first_step in (0, 2):
        trackers = build_trackers(TrackerConfig(swan=own), tmp_path, "test", {"seed": 0}, first_step=first_step)
        for tracker in trackers:
            tracker.log(first_step, {"reward/mean": 0.25, "eval/accuracy/algebra": 0.5})
            tracker.log_summary({"status": "completed", "steps": 1})
        for tracker in trackers:
            tracker.close()
            assert not isinstance(tracker, BackgroundTracker) or tracker.num_lost == 0
    files = sorted((tmp_path / "swanlab").glob("run-*/*.swanlab"))
    run_id = (tmp_path / "swanlab_run_id").read_text()
    assert {path.name for path in files} == {f"run-{run_id}.swanlab"}
    assert all(word in files[0].read_bytes() for word in (b"reward/mean", b"eval/accuracy/algebra", b"rivers"))
    assert [record for record in caplog.records if record.name.startswith("penstock")] == []
