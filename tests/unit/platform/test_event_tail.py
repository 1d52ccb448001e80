"""error.txt contains the events just before a run failed."""

from __future__ import annotations

from pathlib import Path

from penstock.dataflow.ids import TaskId
from penstock.dataflow.ledger import GroupState, Ledger, Reason
from penstock.platform.metrics.flow_stats import EVENTS_KEPT, EventTail
from penstock.platform.run.lifecycle import write_failure


def test_the_newest_events_are_kept_oldest_first(tmp_path: Path) -> None:
    tail = EventTail()
    ledger = Ledger(listeners=(tail,))
    for index in range(EVENTS_KEPT):
        ledger.admit(TaskId(f"t{index}"), 2)
    first = next(ledger.live()).group_id
    ledger.end(first, GroupState.DROPPED, Reason.STALE)
    ledger.mark(7)
    ledger.end(next(ledger.live()).group_id, GroupState.DROPPED, Reason.RUN_END)
    lines = tail.lines()
    assert len(lines) == EVENTS_KEPT
    assert "group 2 generating  t2" in lines[0]
    assert f"group {first} dropped(stale)  t0" in lines[-2]
    assert lines[-1].endswith("v7 published")

    write_failure(tmp_path, ValueError("planted"), lines)
    text = (tmp_path / "error.txt").read_text()
    assert text.index("ValueError: planted") < text.index("newest events of the ledger") < text.index("v7 published")


def test_without_events_there_is_only_the_traceback(tmp_path: Path) -> None:
    write_failure(tmp_path, ValueError("planted"))
    assert "ledger" not in (tmp_path / "error.txt").read_text()
