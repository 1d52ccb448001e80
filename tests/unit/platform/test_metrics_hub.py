"""The catalog of metric names, the hub that enforces it, and the console."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.platform.metrics.console import RunConsole
from penstock.platform.metrics.hub import MetricsHub, catalog, undeclared
from penstock.platform.metrics.progress import format_duration
from penstock.platform.metrics.summary import LedgerCounts, RunSummary
from tools.metrics_page import render_markdown

ROOT = Path(__file__).resolve().parents[3]

STEP = {
    "reward/mean": 0.5,
    "trainer/version": 7.0,
    "staleness/mean_versions": 0.8,
    "staleness/max_versions": 2.0,
    "throughput/generated_tokens_per_s": 12_345.0,
    "throughput/trained_tokens_per_s": 987.0,
    "idle/trainer_share": 0.12,
    "idle/engine_share": 0.34,
}


class ListTracker:
    def __init__(self) -> None:
        self.records = []
        self.summaries = []
        self.num_closed = 0

    def log(self, step, metrics):
        self.records.append((step, dict(metrics)))

    def log_summary(self, summary):
        self.summaries.append(summary)

    def close(self):
        self.num_closed += 1


def a_summary(**changes) -> RunSummary:
    values = {
        "name": "demo", "seed": 0, "status": "completed", "version": "0.1.0", "eval_before": 0.5, "eval_after": 0.94,
        "reward_first": 0.4, "reward_last": 0.8, "steps": 100, "wall_s": 125.0, "trained_groups": 10,
        "max_staleness_configured": 2, "max_staleness_seen": 2, "share_tokens_stale": 0.6,
        "multi_version_trajectories": 42, "tokens_generated": 2000, "tokens_trained": 1500, "peak_memory_gib": 4.2,
        "ledger": LedgerCounts(admitted=12, trained=10, dropped=2, filtered=0, failed=0, live=0),
    }  # fmt: skip
    return RunSummary(**{**values, **changes})


def test_docs_metrics_md_is_the_rendered_catalog() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert text == render_markdown(), "docs/metrics.md is old: python tools/metrics_page.py > docs/metrics.md"


def test_every_declared_metric_is_on_the_page_and_fully_described() -> None:
    page = render_markdown()
    for name, metric in catalog().items():
        assert re.fullmatch(r"[a-z]+/(\*|[a-z0-9_]+(/\*)?)", name)
        assert f"| `{name}` |" in page, f"family of {name} has no section"
        assert metric.keys() == {"unit", "meaning", "healthy", "where"}
        assert all(isinstance(text, str) and text for text in metric.values())


def test_a_starred_name_declares_its_prefix_only() -> None:
    assert undeclared(["reward/part/exact"]) == []
    assert undeclared(["reward/part/", "reward/part/*", "reward/other", "reward/mean"]) == [
        "reward/other",
        "reward/part/",
        "reward/part/*",
    ]


def test_an_undeclared_name_is_refused_by_name_and_nothing_is_logged() -> None:
    tracker = ListTracker()
    hub = MetricsHub([tracker])
    with pytest.raises(AssertionError, match="bogus/name"):
        hub.log(1, {"reward/mean": 0.1, "bogus/name": 1.0})
    assert tracker.records == []


def test_steps_may_repeat_but_not_go_back() -> None:
    hub = MetricsHub([])
    hub.log(2, {"reward/mean": 0.1})
    hub.log(2, {"eval/accuracy": 0.5})
    with pytest.raises(AssertionError, match="step 1"):
        hub.log(1, {"reward/mean": 0.1})


def test_the_hub_feeds_every_sink_keeps_history_and_closes_once() -> None:
    trackers = [ListTracker(), ListTracker()]
    hub = MetricsHub(trackers)
    hub.log(0, {"eval/accuracy": 0.5})
    hub.log(1, {"reward/mean": 0.1})
    hub.log(2, {"reward/mean": 0.2, "memory/pss_gib": 3.0})
    hub.close(a_summary())
    hub.close(a_summary())
    assert hub.rewards == [0.1, 0.2]
    for tracker in trackers:
        assert [step for step, _ in tracker.records] == [0, 1, 2]
        assert tracker.summaries[0]["ledger"]["admitted"] == 12
        assert tracker.num_closed == 1


def test_every_sink_has_the_summary_before_one_is_waited_for_and_all_are_closed_if_one_fails() -> None:
    order: list[str] = []

    class Recorded(ListTracker):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        def log_summary(self, summary: Mapping[str, Any]) -> None:
            order.append(f"summary {self._name}")
            if self._name == "b":
                raise OSError("full")

        def close(self) -> None:
            order.append(f"close {self._name}")

    with pytest.raises(OSError, match="full"):
        MetricsHub([Recorded("a"), Recorded("b"), Recorded("c")]).close(a_summary())
    assert order == ["summary a", "summary b", "close c", "close b", "close a"]
    order.clear()
    MetricsHub([Recorded("a"), Recorded("c")]).close(a_summary())
    assert order == ["summary a", "summary c", "close c", "close a"]


def test_a_json_console_prints_an_object_per_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = RunConsole(100, "json", stream=stream)
    console.header("demo", {"model": "tiny"})
    console.note("starting")
    hub = MetricsHub([], console)
    hub.log(1, STEP | {"loss/policy": float("nan")})
    console.final(a_summary(), tmp_path)
    start, note, metrics, summary = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert start == {"event": "start", "name": "demo", "model": "tiny"}
    assert note == {"event": "note", "text": "starting"}
    assert (metrics["event"], metrics["step"], metrics["metrics"]) == ("metrics", 1, STEP)
    assert (summary["event"], summary["run_dir"], summary["ledger"]["admitted"]) == ("summary", str(tmp_path), 12)


def test_a_quiet_console_prints_only_how_the_run_ended(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = RunConsole(100, "quiet", stream=stream)
    console.header("demo", {"model": "tiny"})
    console.note("starting")
    MetricsHub([], console).log(1, STEP)
    assert stream.getvalue() == ""
    console.final(a_summary(), tmp_path)
    assert "completed · 100 steps" in stream.getvalue()


def test_the_console_prints_one_plain_line_per_step_where_it_is_no_terminal() -> None:
    stream, seconds = io.StringIO(), iter(range(0, 100, 3))
    console = RunConsole(100, stream=stream, clock=lambda: next(seconds))
    console.header("demo", {"model": "tiny [not markup]"})
    lines_before = len(stream.getvalue().splitlines())
    hub = MetricsHub([], console)
    hub.log(0, {"eval/accuracy": 0.51})
    hub.log(1, STEP)
    hub.log(1, {"reward/mean": 0.9})
    hub.log(2, {"loss/policy": 0.1})
    hub.log(2, STEP)
    lines = stream.getvalue().splitlines()[lines_before:]
    assert len(lines) == 4, "two lines of heading, two steps"
    assert lines[2].split() == ["1/100", "7", "0.500", "0.510", "0.80/2", "12.3k", "987", "12%/34%", "–"]
    assert lines[3].split()[0] == "2/100"
    assert lines[3].split()[-2:] == ["4m", "54s"], "98 steps of 3 s"
    assert "tiny [not markup]" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert all(len(line) <= 80 for line in lines)


def test_the_console_shows_the_steps_that_are_trained_again_after_a_rollback() -> None:
    stream = io.StringIO()
    hub = MetricsHub([], RunConsole(100, stream=stream))
    for step in (1, 2, 3):
        hub.log(step, STEP)
    hub.roll_back(1, list)
    for step in (2, 3):
        hub.log(step, STEP)
    assert re.findall(r"(\d)/100", stream.getvalue()) == ["1", "2", "3", "2", "3"]


def test_graded_rewards_are_shown_by_their_mean_until_a_task_is_solved() -> None:
    stream = io.StringIO()
    hub = MetricsHub([], RunConsole(100, stream=stream))
    hub.log(0, {"eval/accuracy": 0.0, "eval/reward_mean": 0.25})
    hub.log(1, STEP)
    hub.log(1, {"eval/accuracy": 0.1, "eval/reward_mean": 0.35})
    hub.log(2, STEP)
    hub.log(2, {"eval/accuracy": 0.0, "eval/reward_mean": 0.3})
    hub.log(3, STEP)
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert [line[1] for line in lines if line[0] == "mean"] == ["mean", "share"], "the second heading"
    assert [line[3] for line in lines if "/100" in line[0]] == ["0.250", "0.100", "0.000"]


def test_the_last_lines_have_accuracy_and_mean_reward_or_of_graded_rewards_the_mean(tmp_path: Path) -> None:
    def final(**figures: Any) -> str:
        stream = io.StringIO()
        RunConsole(100, stream=stream).final(a_summary(**figures), tmp_path)
        return next(line for line in stream.getvalue().splitlines() if line.strip().startswith("eval"))

    rewards = {"eval_reward_before": 0.25, "eval_reward_after": 0.5}
    assert final(**rewards).endswith("accuracy 50.0% → 94.0%, mean reward 0.250 → 0.500")
    graded = final(eval_before=0.0, eval_after=0.0, **rewards)
    assert graded.endswith("mean reward 0.250 → 0.500  (none solved: all below dataflow.pass_reward)")
    nothing = final(eval_before=0.0, eval_after=0.0, eval_reward_before=0.0, eval_reward_after=0.0)
    assert nothing.endswith("accuracy 0.0% → 0.0%, mean reward 0.000 → 0.000")


@pytest.mark.parametrize(
    ("width", "names"),
    [
        (40, ["step", "reward", "eval", "left"]),
        (60, ["step", "reward", "eval", "staleness", "idle", "left"]),
        (80, ["step", "version", "reward", "eval", "staleness", "sampled", "trained", "idle", "left"]),
    ],
)
def test_a_narrow_terminal_shows_the_columns_that_fit(
    width: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = RunConsole(100, stream=stream)
    console.observe(1, STEP)
    heading, _, step = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in stream.getvalue().splitlines()]
    assert heading.split() == names
    assert max(len(heading), len(step)) <= width
    assert ("1/100" in step, "0.500" in step) == (True, True)


def test_the_closing_block_shows_the_gain_the_ledger_and_the_files(tmp_path: Path) -> None:
    stream = io.StringIO()
    (tmp_path / "report.html").write_text("")
    failed = {"env: timed out after 30 s": 2, "reward: it raised KeyError: 'x' (my.py, line 7)": 51}
    RunConsole(100, stream=stream).final(a_summary(eval_before=None, failed_attempts=failed), tmp_path)
    text = stream.getvalue()
    assert "not measured → 94.0%" in text
    assert "admitted 12 = trained 10 + dropped 2 + filtered 0 + failed 0 + live 0" in text
    assert str(tmp_path / "summary.json") in text
    assert str(tmp_path / "report.html") in text
    assert "failed    51 attempts, reward: it raised KeyError: 'x' (my.py, line 7)\n  failed    2 attempts, env" in text
    assert "does not balance" not in text


def test_a_ledger_that_does_not_balance_is_reported(tmp_path: Path) -> None:
    stream = io.StringIO()
    summary = a_summary(ledger=LedgerCounts(admitted=13, trained=10, dropped=2, filtered=0, failed=0, live=0))
    RunConsole(100, stream=stream).final(summary, tmp_path)
    assert "does not balance" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59.4, "59s"), (60, "1m 00s"), (185, "3m 05s"), (7800, "2h 10m")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
