"""The timeline of a run: what is in it, that it stays bounded, and that it can be read whenever the run ended."""

import itertools
import json
from collections import Counter

import pytest

from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupState, Ledger, Reason
from penstock.platform.metrics.timeline import (
    BATCHES_SHOWN,
    BLOCK,
    GROUPS,
    GROUPS_PER_BATCH,
    RUN,
    Timeline,
    read_timeline,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def slices(run_dir, process=GROUPS):
    return [one for one in read_timeline(run_dir / "timeline.json") if one["ph"] == "X" and one["pid"] == process]


def ledger_of(timeline):
    return Ledger(listeners=(timeline,))


def pass_through(ledger, group_id, end=GroupState.TRAINED):
    for state in (GroupState.SCORING, GroupState.READY, GroupState.TRAINING, end):
        ledger.move(group_id, state)


def test_a_trained_group_has_four_slices_without_gaps(tmp_path):
    timeline = Timeline(tmp_path, batch_groups=2, total_steps=3, clock=Clock())
    ledger = ledger_of(timeline)
    record = ledger.admit(TaskId("task-7"), 4)
    pass_through(ledger, record.group_id)
    timeline.close()
    found = slices(tmp_path)
    assert [one["name"] for one in found] == ["generate", "score", "wait", "train"]
    for earlier, later in itertools.pairwise(found):
        assert earlier["ts"] + earlier["dur"] == later["ts"]
    assert {one["args"]["task"] for one in found} == {"task-7"}
    assert len({one["tid"] for one in found}) == 1


def test_a_group_that_ends_early_says_how(tmp_path):
    timeline = Timeline(tmp_path, batch_groups=2, total_steps=3, clock=Clock())
    ledger = ledger_of(timeline)
    ledger.end(ledger.admit(TaskId("a"), 4).group_id, GroupState.FAILED, Reason.REWARD)
    ledger.admit(TaskId("b"), 4)
    timeline.close()
    assert [one["args"]["ended"] for one in slices(tmp_path)] == ["failed(reward)", "with the run"]


def test_live_groups_never_share_a_lane_and_lanes_are_used_again(tmp_path):
    timeline = Timeline(tmp_path, batch_groups=2, total_steps=3, clock=Clock())
    ledger = ledger_of(timeline)
    live: list[GroupId] = []
    for step in range(40):
        live.append(ledger.admit(TaskId(f"t{step}"), 1).group_id)
        if len(live) == 3:
            pass_through(ledger, live.pop(step % 3))
    timeline.close()
    by_lane: dict[int, list[tuple[int, int]]] = {}
    for one in slices(tmp_path):
        by_lane.setdefault(one["tid"], []).append((one["ts"], one["ts"] + one["dur"]))
    assert len(by_lane) == 3
    for spans in by_lane.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_the_number_of_groups_is_bounded_in_a_long_run_of_large_batches(tmp_path):
    batch, steps = 4 * GROUPS_PER_BATCH - 1, 2000
    timeline = Timeline(tmp_path, batch_groups=batch, total_steps=steps, clock=Clock())
    shown = Counter(one // batch for one in range(batch * steps) if timeline._is_shown(GroupId(one)))
    timeline.close()
    assert max(shown.values()) == GROUPS_PER_BATCH
    assert set(range(BLOCK)) < set(shown)
    assert len(shown) <= BATCHES_SHOWN + BLOCK
    assert max(shown) > steps - BLOCK * (steps // BATCHES_SHOWN + 1), "late groups are there"


def test_the_closed_file_is_json_that_perfetto_takes(tmp_path):
    timeline = Timeline(tmp_path, batch_groups=2, total_steps=3)
    timeline.add("publish", "publish v1", 10.0, 10.25, bytes=12)
    timeline.close()
    events = json.loads((tmp_path / "timeline.json").read_text())
    check_trace_events(events)
    (published,) = [one for one in events if one["ph"] == "X"]
    assert (published["pid"], published["ts"], published["dur"], published["args"]) == (RUN, 10e6, 250e3, {"bytes": 12})
    assert {one["args"]["name"] for one in events if one["name"] == "process_name"} == {"run", "groups"}


@pytest.mark.parametrize("how", ["closed", "left open", "cut in a line", "empty"])
def test_a_resumed_run_goes_on_in_the_same_file(tmp_path, how):
    first = Timeline(tmp_path, batch_groups=2, total_steps=3)
    first.add("trainer", "step v1", 1.0, 2.0)
    first.close()
    path = tmp_path / "timeline.json"
    if how == "empty":
        path.write_text("")
    elif how != "closed":
        text = path.read_text().removesuffix("\n]\n") + ",\n"
        path.write_text(text + ('{"ph":"X","pi' if how == "cut in a line" else ""))
        assert read_timeline(path)
    second = Timeline(tmp_path, batch_groups=2, total_steps=3)
    second.add("trainer", "step v2", 3.0, 4.0)
    second.close()
    check_trace_events(json.loads(path.read_text()))
    assert [one["name"] for one in slices(tmp_path, RUN)] == ["step v1", "step v2"][how == "empty" :]


def test_a_disk_that_refuses_costs_the_timeline_alone(tmp_path):
    timeline = Timeline(tmp_path / "gone", batch_groups=2, total_steps=3)
    timeline.add("trainer", "step v1", 1.0, 2.0)
    timeline.close()
    assert isinstance(timeline.error, FileNotFoundError)


def check_trace_events(events):
    """The parts of the trace-event format that Perfetto refuses or silently drops when they are wrong."""
    for one in events:
        assert one["ph"] in {"X", "M"}
        assert type(one["pid"]) is int
        assert type(one["tid"]) is int
        assert type(one["ts"]) is int
        assert isinstance(one["args"], dict)
        if one["ph"] == "X":
            assert type(one["dur"]) is int
            assert one["dur"] >= 0
            assert one["name"]
        else:
            assert one["name"] in {"process_name", "thread_name", "process_sort_index"}
