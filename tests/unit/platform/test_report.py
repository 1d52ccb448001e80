"""The report and the trajectory table: complete and incomplete runs, hostile text, no network."""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from penstock.dataflow.errors import PenstockError, TrainingError, TrajectoryError
from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Episode, GroupRef, Thread, Trajectory, Turn
from penstock.dataflow.versions import Span
from penstock.platform.metrics import report_data, report_server
from penstock.platform.metrics.comparison import compare
from penstock.platform.metrics.evaluation_table import MAX_ROWS_PER_SET, EvaluationTable
from penstock.platform.metrics.flow_stats import FlowStats, sampled_every
from penstock.platform.metrics.report import write_report
from penstock.platform.metrics.report_charts import distribution_charts, health_charts
from penstock.platform.metrics.report_data import MAX_TOKENS_SHOWN, groups_data, timeline_data
from penstock.platform.metrics.report_server import LiveReport, serve_report
from penstock.platform.metrics.run_record import read_run
from penstock.platform.metrics.summary import LedgerCounts, RunSummary, write_failures, write_staleness, write_summary
from penstock.platform.metrics.timeline import read_timeline
from penstock.platform.metrics.trackers.jsonl import JsonlTracker
from penstock.platform.metrics.trajectory_table import TrajectoryTable, read_trajectories
from penstock.platform.run.lifecycle import write_failure
from tests.chromium import CHROMIUM, inspect_page
from tests.report_runs import write_run, write_timeline

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
        metrics["throughput/step_s"] = 2.0
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


def data_of(page: str) -> dict[str, Any]:
    """What the scripts of the page draw."""
    (text,) = re.findall(r'<script type="application/json" id="run-data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    return data


def test_a_complete_run_gives_one_page_with_everything_on_it(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = without_plotly(path.read_text(encoding="utf-8"))
    for text in (
        "demo-run", "completed", "87.5%", "Training reward", "Held-out accuracy", "Staleness of the trained tokens",
        "Who waits for whom", "busy 75%", "idle 75%", "12 groups admitted", "balances", "47+85=",
    ):  # fmt: skip
        assert text in page, text
    assert "Some pieces of this run are missing" not in page
    assert page.count("Plotly.newPlot(") == 5


def test_a_long_step_counts_for_as_long_as_it_took_in_the_idle_time_of_the_run(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in range(1, 101):
        idle = {"idle/trainer_share": 0.9, "throughput/step_s": 1000.0}
        tracker.log(step, idle if step == 1 else {"idle/trainer_share": 0.0, "throughput/step_s": 1.0})
    tracker.close()
    assert "Idle 81.9% of the time" in write_report(tmp_path).read_text(encoding="utf-8"), "900 of 1,099 s"
    results, _ = compare([read_run(tmp_path)])
    assert ["trainer idle, last 10 steps", "0%"] in results


def test_values_that_are_not_finite_hide_no_others_in_the_lines_of_a_long_run(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in range(1, 6001):
        tracker.log(step, {"loss/grad_norm": float("nan" if step % 20 == 0 else "inf" if step % 20 == 7 else 2.0)})
    tracker.close()
    (chart,) = health_charts(read_run(tmp_path))
    for line in re.findall(r'"y":\[(.*?)\]', chart.html):
        assert set(line.split(",")) == {"2.0"}


def test_tasks_that_only_the_larger_evaluations_skip_are_told(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(0, {"eval/accuracy": 0.5, "eval/tasks": 30, "eval/skipped": 2})
    tracker.log(5, {"eval/accuracy": 0.6, "eval/tasks": 8, "eval/skipped": 0})
    tracker.close()
    assert "On 30 of 32 tasks: the other prompts are too long." in write_report(tmp_path).read_text(encoding="utf-8")


def test_rewards_that_are_equal_up_to_rounding_have_one_row(tmp_path: Path) -> None:
    table = TrajectoryTable(tmp_path)
    for step in (1, 2):
        members = [a_trajectory(f"{step}/{index}", reward=reward) for index, reward in enumerate((0.3, 0.1 + 0.2, 1.0))]
        table.write_step(step, members, version=6)
    (tmp_path / "config.yaml").write_text("name: equal\n")
    chart = distribution_charts(read_run(tmp_path))[0]
    assert '"y":[0.3,1.0],"z":[[0.667,0.667],[0.333,0.333]]' in chart.html


def test_what_a_model_wrote_is_escaped_and_the_page_reaches_no_network(run_dir: Path) -> None:
    page = without_plotly(write_report(run_dir).read_text(encoding="utf-8"))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "<i>form" not in page
    assert data_of(page)["groups"][0]["members"][0]["turns"][0]["text"] == HOSTILE
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
    assert {sentence.split()[0] for sentence in record.missing} == {"config.yaml", "summary.json", "trajectories"}
    assert record.values("reward/mean") == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "trajectories/step_000002.parquet cannot be read" in page
    assert [group["step"] for group in data_of(page)["groups"]] == [1]


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
        "threads": [], "turns": [], "retried_after": "", "policy_id": "policy", "token_ids": [0] * 6,
        "loss_mask": [False, False, True, True, True, True], "behavior_logprobs": [0.0] * 6, "tokens": [],
        "logprobs": [], "advantages": [],
    }  # fmt: skip


def test_an_episode_is_kept_turn_by_turn_with_what_the_environment_said(tmp_path: Path) -> None:
    turns = (
        Turn(
            "x",
            "length",
            1,
            "\nuser: <go on>\n",
            5,
            thread="a",
            num_interruptions=1,
            reasoning="hm ",
            sampling_s=1.25,
            environment_s=0.5,
        ),
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
            "seconds": 1.25,
            "finish_reason": "length",
            "interruptions": 1,
        },
        {"role": "environment", "thread": "a", "text": "\nuser: <go on>\n", "num_tokens": 5, "seconds": 0.5},
        {"role": "policy", "thread": "b", "text": "yz", "num_tokens": 3, "seconds": 0.0}
        | {"finish_reason": "stop", "interruptions": 0},
    ]
    (tmp_path / "config.yaml").write_text("name: turns\n")
    (group,) = data_of(write_report(tmp_path).read_text())["groups"]
    assert [turn["text"] for turn in group["members"][0]["turns"]] == ["hm x", "\nuser: <go on>\n", "yz"]


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
    shown = data_of(write_report(tmp_path).read_text())["groups"]
    assert sorted(group["group"] for group in shown) == [0, 2, 5]
    assert [[one["versus_group"] for one in group["members"]] for group in shown] == [[-1.5, -0.5, 0.5, 1.5]] * 3


@pytest.mark.parametrize(("batch", "size", "every"), [(64, 8, 32), (1, 8, 1), (4, 8, 2), (8, 2, 1), (8, 64, 8)])
def test_of_a_large_batch_few_groups_are_written(batch: int, size: int, every: int) -> None:
    assert sampled_every(batch, size) == every


def test_the_report_reads_few_steps_of_a_long_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: long\n")
    table = TrajectoryTable(tmp_path)
    for step in range(1, 31):
        table.write_step(step, [a_trajectory()], version=5)
    record = read_run(tmp_path)
    steps = [row["step"] for row in record.rows(record.trajectories)][::-1]
    assert len(steps) == 8
    assert (steps[0], steps[-1]) == (1, 30)


def test_the_report_holds_few_of_the_tokens_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_data, "MAX_GROUPS_BYTES", 100_000)
    count = 300
    one = replace(
        a_trajectory(), token_ids=np.zeros(count, np.int32), loss_mask=np.ones(count, bool),
        behavior_logprobs=np.zeros(count, np.float32), spans=(Span(1, count),),
    )  # fmt: skip
    table = EvaluationTable(tmp_path, token_texts=lambda ids: ["x" for _ in ids])
    for step in (1, 2):
        table.write(step, [(Task(one.task_id, one.prompt), [one])] * MAX_ROWS_PER_SET)
    (tmp_path / "config.yaml").write_text("name: long\n")
    tracemalloc.start()
    record = read_run(tmp_path)
    data = groups_data(record.rows(record.trajectories), record.rows(record.answers))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(data["groups"]) + data["num_left_out"] == 2 * MAX_ROWS_PER_SET
    assert data["groups"][0]["step"] == 2
    assert peak < 3e6


def test_tokens_are_shown_in_stretches_with_what_is_known_of_each(tmp_path: Path) -> None:
    said = (Turn("x", "stop", 1, "said", 1, sampling_s=2.0, environment_s=0.25), Turn("yz", "length", 2))
    one = replace(
        a_trajectory(),
        episode=Episode(said, "done"),
        loss_mask=np.array([0, 0, 1, 0, 1, 1], bool),
        spans=(Span(4, 1), Span(5, 2)),
    )
    one = replace(one, behavior_logprobs=np.array([0, 0, -1, 0, -2, -3], np.float32))
    nan = float("nan")
    trained = {
        one.trajectory_id: (
            np.array([nan, nan, -1.5, nan, -2, nan], np.float32),
            np.array([nan, nan, 0.5, nan, 0.5, nan], np.float32),
        )
    }
    (tmp_path / "config.yaml").write_text("name: tokens\n")
    table = TrajectoryTable(tmp_path, token_texts=lambda ids: [f"<{place}>" for place, _ in enumerate(ids)])
    table.write_step(1, [one], version=6, trained=trained)
    (group,) = data_of(write_report(tmp_path).read_text())["groups"]
    first, between, last = group["members"][0]["stretches"]
    assert (first["role"], first["texts"], first["versions"]) == ("policy", ["<2>"], [4])
    assert (first["logprobs"], first["trained"], first["advantages"]) == ([-1.0], [-1.5], [0.5])
    assert (first["seconds"], last["finish_reason"]) == (2.0, "length")
    assert (between["role"], between["texts"], between["seconds"]) == ("environment", ["<3>"], 0.25)
    assert (last["versions"], last["logprobs"], last["trained"]) == ([5, 5], [-2.0, -3.0], [-2.0, None])


def test_a_long_trajectory_shows_its_first_tokens_and_says_how_many_are_left_out(tmp_path: Path) -> None:
    count = MAX_TOKENS_SHOWN + 25
    mask = np.array([False, *[True] * count])
    one = replace(
        a_trajectory(),
        token_ids=np.zeros(count + 1, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.zeros(count + 1, np.float32),
        spans=(Span(1, count),),
    )
    (tmp_path / "config.yaml").write_text("name: long\n")
    TrajectoryTable(tmp_path, token_texts=lambda ids: ["x" for _ in ids]).write_step(1, [one], version=2)
    member = data_of(write_report(tmp_path).read_text())["groups"][0]["members"][0]
    assert member["num_left_out"] == 25
    assert sum(len(stretch["texts"]) for stretch in member["stretches"]) == MAX_TOKENS_SHOWN


def test_a_failed_run_shows_its_reason_first(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    (run_dir / "error.txt").write_text(
        "Traceback (most recent call last):\n  File 'x.py', line 3\n"
        "penstock.dataflow.errors.TrainingError: trainer: rank 1 is lost.\nSee its log: logs/trainer-1.log\n"
        "\nThe newest events of the ledger, by time before the error:\n   -0.1 s  group 3 ready\n"
    )
    page = without_plotly(write_report(run_dir).read_text(encoding="utf-8"))
    assert (
        "<p>penstock.dataflow.errors.TrainingError: trainer: rank 1 is lost.\nSee its log: logs/trainer-1.log</p>"
        in page
    )
    assert "group 3 ready" in page


def test_half_an_emoji_in_an_error_ends_neither_the_page_nor_the_error(run_dir: Path) -> None:
    half = "bad answer \ud83d"
    write_failure(run_dir, TrainingError(half))
    write_failures(run_dir, [TrajectoryError("reward", f"ValueError: {half}")])
    for page in (write_report(run_dir).read_text(encoding="utf-8"), LiveReport(run_dir).page()):
        assert "ValueError: bad answer ?" in page
    assert "TrainingError: bad answer \\ud83d" in (run_dir / "error.txt").read_text(encoding="utf-8")


def test_tasks_of_two_evaluation_sets_with_one_id_are_two_groups(tmp_path: Path) -> None:
    answers = [
        (Task(TaskId("1"), name, evaluation_set=name), [replace(a_trajectory(reward=reward), task_id=TaskId("1"))])
        for name, reward in (("easy", 1.0), ("hard", 0.0))
    ]
    EvaluationTable(tmp_path).write(5, answers)
    (tmp_path / "config.yaml").write_text("name: sets\n")
    groups = data_of(write_report(tmp_path).read_text(encoding="utf-8"))["groups"]
    assert [(group["set"], len(group["members"])) for group in groups] == [("easy", 1), ("hard", 1)]


def test_the_timeline_of_a_long_run_is_shown_in_windows_with_groups(tmp_path: Path) -> None:
    write_timeline(tmp_path, 2000, np.random.default_rng(0))
    windows = timeline_data(read_timeline(tmp_path / "timeline.json"))
    assert [window["label"].split()[1] for window in windows] == ["v1", "v1025", "v1985"]
    for window in windows[:2]:
        names = Counter(name for _, _, _, name, _ in window["slices"])
        assert names["train"] >= 16 * 4
        assert sum(name.startswith("step v") for name in names) == 16
    for window in windows:
        assert all(
            0 <= begin <= begin + length <= window["seconds"] + 1e-3 for _, begin, length, *_ in window["slices"]
        )
        assert {row for row, *_ in window["slices"]} <= set(range(4 + window["num_lanes"]))


@pytest.mark.parametrize(("limit", "num_left_out"), [(10_000, 0), (100, 8)])
def test_lanes_of_the_timeline_are_shown_to_the_end_of_the_window_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, num_left_out: int
) -> None:
    monkeypatch.setattr(report_data, "MAX_GROUP_SLICES", limit)
    write_timeline(tmp_path, 100, np.random.default_rng(0))
    last = timeline_data(read_timeline(tmp_path / "timeline.json"))[-1]
    assert last["num_lanes_left_out"] == num_left_out
    ends: dict[int, float] = {}
    for row, begin, length, *_ in last["slices"]:
        ends[row] = max(ends.get(row, 0.0), begin + length)
    of_groups = [end for row, end in ends.items() if row >= len(last["tracks"])]
    assert len(of_groups) == last["num_lanes"] > 0
    assert min(of_groups) > 0.75 * last["seconds"]


def test_a_live_report_is_made_again_when_the_run_has_written(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_server, "MIN_INTERVAL_S", 0.0)
    (run_dir / "summary.json").unlink()
    report = LiveReport(run_dir)
    first, page = report.stamp(), report.page()
    assert f'data-stamp="{first}"' in page
    assert report.page() is page, "made once"
    assert report.stamp() == first
    tracker = JsonlTracker(run_dir)
    tracker.log(6, {"reward/mean": 0.9})
    tracker.close()
    assert report.stamp() != first
    assert f'data-stamp="{report.stamp()}"' in report.page()


async def test_a_live_report_is_served_to_this_machine(run_dir: Path) -> None:
    ready: asyncio.Queue[str] = asyncio.Queue()
    serving = asyncio.create_task(serve_report(run_dir, 0, ready.put_nowait))
    url = await asyncio.wait_for(ready.get(), timeout=30)
    assert url.startswith("http://127.0.0.1:")
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert "connect-src 'self'" in await answer.text()
        async with session.get(f"{url}stamp") as answer:
            assert await answer.text()
        async with session.get(f"{url}config.yaml") as answer:
            assert answer.status == 404
        with pytest.raises(PenstockError, match="cannot be used"):
            await serve_report(run_dir, int(url.rstrip("/").rpartition(":")[2]), ready.put_nowait)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_answers_of_a_set_of_any_name_are_shown(tmp_path: Path) -> None:
    task = Task(TaskId("1"), "47+85=", evaluation_set="math: hard: 5")
    EvaluationTable(tmp_path).write(5, [(task, [a_trajectory()])])
    (tmp_path / "config.yaml").write_text("name: sets\n")
    (result,) = inspect_page(write_report(tmp_path), [1200], [".group"])
    assert (result["errors"], result["counts"][".group"]) == ([], 1)


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("steps", [60, pytest.param(10_000, marks=pytest.mark.full)])
def test_the_page_fits_phones_and_wide_screens_and_its_scripts_run(tmp_path: Path, steps: int) -> None:
    path = write_report(write_run(tmp_path / "run", steps))
    assert path.stat().st_size <= 15e6
    counted = [".group", ".member", ".token", "#timeline-picture rect"]
    for result in inspect_page(path, [390, 1200, 1900], counted):
        assert not result["errors"]
        assert not result["too_wide"]
        assert result["page_width"] <= result["width"]
        assert "hostile" not in result["title"]
        assert len(result["charts"]) > 10
        assert all(abs(width - drawn) <= 2 for width, drawn in result["charts"]), result["charts"]
        assert result["counts"][".group"] == 16
        assert result["counts"][".member"] == 8, "the first group is open"
        assert result["counts"][".token"] > 100
        assert result["counts"]["#timeline-picture rect"] > 16
