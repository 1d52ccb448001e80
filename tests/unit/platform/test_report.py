"""The report and the trajectory table: complete and incomplete runs, hostile text, no network."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.trajectory import Episode, GroupRef, Thread, Trajectory, Turn
from penstock.dataflow.versions import Span
from penstock.platform.metrics.flow_stats import FlowStats, sampled_every
from penstock.platform.metrics.report import write_report
from penstock.platform.metrics.run_record import read_run
from penstock.platform.metrics.summary import LedgerCounts, RunSummary, write_staleness, write_summary
from penstock.platform.metrics.trackers.jsonl import JsonlTracker
from penstock.platform.metrics.trajectory_table import TrajectoryTable, read_trajectories

HOSTILE = "</td></script><script>alert('x')</script><img src=http://evil.example/x onerror=alert(1)>"


def a_trajectory(name: str = "3/0", response: str = "a=1", reward: float | None = 1.0) -> Trajectory:
    loss_mask = np.array([False, False, True, True, True, True])
    return Trajectory(
        trajectory_id=TrajectoryId(name),
        task_id=TaskId("arithmetic/train/7"),
        token_ids=np.zeros(6, np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=np.zeros(6, np.float32),
        spans=(Span(4, 1), Span(5, 3)),
        prompt="47+85=",
        response=response,
        finish_reason="stop",
        reward=reward,
        reward_parts={"exact": 1.0, "<i>form</i>": 0.5},
    )


def log_run(run_dir: Path) -> None:
    tracker = JsonlTracker(run_dir)
    tracker.log(0, {"eval/accuracy": 0.5})
    for step in range(1, 6):
        metrics = {"reward/mean": 0.1 * step, "staleness/mean_versions": 0.5, "staleness/max_versions": 2.0}
        tracker.log(
            step, {**metrics, "idle/trainer_share": 0.25, "idle/engine_share": 0.75, "loss/policy": float("nan")}
        )
    tracker.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(
        f'name: "{HOSTILE}"\nseed: 0\ntotal_steps: 5\ndataflow: {{max_staleness: 2}}\n'
    )
    log_run(tmp_path)
    TrajectoryTable(tmp_path).write_step(1, [a_trajectory(response=HOSTILE)], version=6)
    write_staleness(tmp_path, {0: 100, 1: 300})
    summary = RunSummary(
        name="demo-run", seed=0, status="completed", version="0.1.0", eval_before=0.5, eval_after=0.875,
        reward_first=0.15, reward_last=0.45, steps=5, wall_s=65.0, trained_groups=10, max_staleness_configured=2,
        max_staleness_seen=1, share_tokens_stale=0.75, multi_version_trajectories=7, tokens_generated=500,
        tokens_trained=400, peak_memory_gib=2.5, ledger=LedgerCounts(12, 10, 2, 0, 0, 0),
    )  # fmt: skip
    write_summary(tmp_path, summary)
    return tmp_path


def without_plotly(html: str) -> str:
    """The page without the library, which is the first script."""
    return re.sub(r"<script>.*?</script>", "", html, count=1, flags=re.DOTALL)


def test_a_complete_run_gives_one_page_with_everything_on_it(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = without_plotly(path.read_text(encoding="utf-8"))
    for text in (
        "demo-run", "completed", "87.5%", "Training reward", "Held-out accuracy", "Staleness of the trained tokens",
        "Who waits for whom", "busy 75%", "idle 75%", "12 groups admitted", "balances", "47+85=", "v4·1", "v5·3",
    ):  # fmt: skip
        assert text in page, text
    assert "Some pieces of this run are missing" not in page
    assert page.count("Plotly.newPlot(") == 5


def test_what_a_model_wrote_is_escaped_and_the_page_reaches_no_network(run_dir: Path) -> None:
    page = without_plotly(write_report(run_dir).read_text(encoding="utf-8"))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "<i>form" not in page
    assert "&lt;script&gt;alert" in page
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)
    assert "default-src 'none'" in page


def test_a_run_that_has_not_finished_is_shown_with_what_is_missing(tmp_path: Path) -> None:
    log_run(tmp_path)
    page = without_plotly(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "incomplete" in page
    for name in ("config.yaml", "summary.json", "staleness.json", "trajectories"):
        assert f"{name} is missing" in page
    assert "Training reward" in page


def test_a_run_stopped_before_its_first_step_still_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: early\n")
    assert "early" in write_report(tmp_path).read_text(encoding="utf-8")


def test_unreadable_pieces_are_named_and_the_rest_is_shown(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text("{")
    (run_dir / "config.yaml").write_text("a: [")
    (run_dir / "trajectories" / "step_000002.parquet").write_text("no parquet")
    record = read_run(run_dir)
    assert [sentence.split()[0] for sentence in record.missing] == ["config.yaml", "summary.json", "trajectories"]
    assert record.values("reward/mean") == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    write_report(run_dir)


@pytest.mark.parametrize(("name", "message"), [("absent", "no such directory"), ("", "is not a run")])
def test_a_directory_that_is_no_run_is_a_clear_error(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        write_report(tmp_path / name)


def test_the_trajectory_table_keeps_what_the_browser_needs(tmp_path: Path) -> None:
    trajectory = a_trajectory(response="bad \ud800 surrogate", reward=None)
    path = TrajectoryTable(tmp_path).write_step(9, [trajectory], version=6)
    (row,) = read_trajectories(path)
    assert row == {
        "step": 9, "group_id": 3, "trajectory_id": "3/0", "task_id": "arithmetic/train/7", "prompt": "47+85=",
        "response": "bad ? surrogate", "reward": None, "reward_parts": {"exact": 1.0, "<i>form</i>": 0.5},
        "finish_reason": "stop", "spans": [[4, 1], [5, 3]], "staleness": 2, "num_tokens": 4,
        "threads": [], "turns": [], "retried_after": "",
    }  # fmt: skip


def test_an_episode_is_kept_turn_by_turn_with_what_the_environment_said(tmp_path: Path) -> None:
    turns = (
        Turn("x", "length", 1, "\nuser: <go on>\n", 5, thread="a", num_interruptions=1, reasoning="hm "),
        Turn("yz", "stop", 3, thread="b"),
    )
    threads = (Thread("a", 3), Thread("b", 3, fork_of="a"))
    whole = replace(a_trajectory(), spans=(Span(5, 1), Span(4, 3)), threads=threads, episode=Episode(turns, "done"))
    (row,) = read_trajectories(TrajectoryTable(tmp_path).write_step(1, [whole], version=6))
    assert row["threads"] == [["a", None, 3], ["b", "a", 3]]
    assert row["staleness"] == 2
    assert row["turns"] == [
        {
            "role": "policy",
            "thread": "a",
            "text": "hm x",
            "num_tokens": 1,
            "finish_reason": "length",
            "interruptions": 1,
        },
        {"role": "environment", "thread": "a", "text": "\nuser: <go on>\n", "num_tokens": 5},
        {"role": "policy", "thread": "b", "text": "yz", "num_tokens": 3, "finish_reason": "stop", "interruptions": 0},
    ]
    (tmp_path / "config.yaml").write_text("name: turns\n")
    page = write_report(tmp_path).read_text()
    assert "policy in a · 1 token, cut off" in page
    assert "user: &lt;go on&gt;" in page


def test_a_step_shows_whole_groups_each_reward_against_the_mean_of_its_group(tmp_path: Path) -> None:
    stats = FlowStats(sampled_every=3)
    groups = [[replace(a_trajectory(f"{group}/{i}"), reward=float(i)) for i in range(4)] for group in range(7)]
    for group, members in enumerate(groups):
        stats.group_ready(GroupId(group), members)
    refs = [GroupRef(GroupId(group), TaskId("t"), None, ((Span(5, 4),),) * 4, (1.0,), 6) for group in range(7)]
    stats.batch_closed(refs, version=6)
    assert stats.samples == [*groups[0], *groups[2], *groups[5]], "groups of even and of odd numbers"
    (tmp_path / "config.yaml").write_text("name: groups\n")
    TrajectoryTable(tmp_path).write_step(1, stats.samples, version=6)
    page = write_report(tmp_path).read_text()
    assert [page.count(f">{difference} in its group<") for difference in ("-1.5", "-0.5", "+0.5", "+1.5")] == [3] * 4


@pytest.mark.parametrize(("batch", "size", "every"), [(64, 8, 32), (1, 8, 1), (4, 8, 2), (8, 2, 1), (8, 64, 8)])
def test_of_a_large_batch_few_groups_are_written(batch: int, size: int, every: int) -> None:
    assert sampled_every(batch, size) == every


def test_the_report_reads_few_steps_of_a_long_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: long\n")
    table = TrajectoryTable(tmp_path)
    for step in range(1, 31):
        table.write_step(step, [a_trajectory()], version=5)
    steps = [row["step"] for row in read_run(tmp_path).trajectories]
    assert len(steps) == 8
    assert (steps[0], steps[-1]) == (1, 30)
