"""Metric sinks: what is written, and that a slow or broken one never blocks or goes unnoticed."""

from __future__ import annotations

import json
import logging
import math
import resource
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.imports import check_imports
from penstock.platform.checks.load import compose_config
from penstock.platform.checks.trackers import check_trackers
from penstock.platform.metrics.trackers import jsonl
from penstock.platform.metrics.trackers.base import BackgroundTracker, TrackerError
from penstock.platform.metrics.trackers.build import build_trackers
from penstock.platform.metrics.trackers.config import (
    FactoryTrackerConfig,
    TensorboardTrackerConfig,
    TrackerConfig,
    WandbTrackerConfig,
)
from penstock.platform.metrics.trackers.jsonl import JsonlTracker, drop_later_records, read_metrics
from penstock.platform.metrics.trackers.run_artifacts import COLUMNS, MAX_CHARACTERS, run_artifacts, transcripts
from penstock.platform.metrics.trackers.wandb import resolve_mode
from penstock.platform.metrics.trajectory_table import TRAJECTORY_SCHEMA, BadBatches, StepFiles, TrajectoryTable


class ListTracker:
    """Keeps its records; optionally blocks on a gate or fails a number of times."""

    def __init__(self, gate: threading.Event | None = None, num_failures: int = 0) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.summaries: list[dict[str, object]] = []
        self.is_closed = False
        self._gate = gate
        self._num_failures = num_failures

    def log(self, step, metrics):
        if self._gate is not None:
            self._gate.wait(10)
        if self._num_failures:
            self._num_failures -= 1
            raise ConnectionError("no route")
        self.records.append((step, dict(metrics)))

    def log_summary(self, summary):
        self.summaries.append(dict(summary))

    def close(self):
        self.is_closed = True


def test_each_jsonl_record_is_readable_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.5, "loss/policy": math.nan, "ratio/behavior_max": math.inf})
    (record,) = read_metrics(tmp_path)
    tracker.close()
    assert record.step == 1
    assert abs(record.time_s - time.time()) < 60
    assert record.metrics["reward/mean"] == 0.5
    assert math.isnan(record.metrics["loss/policy"])
    assert record.metrics["ratio/behavior_max"] == math.inf


def test_a_torn_last_line_is_skipped_and_a_broken_one_before_it_is_an_error(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "tim')
    assert [record.step for record in read_metrics(tmp_path)] == [1]
    path.write_text("garbage\n" + path.read_text())
    with pytest.raises(TrackerError, match=r"metrics\.jsonl:1"):
        list(read_metrics(tmp_path))


def test_a_resumed_run_drops_later_records_without_holding_the_file_in_memory(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for step in range(1, 1001):
        tracker.log(step, {f"loss/measured/{index}": 0.123456789 for index in range(50)})
    tracker.close()
    size = (tmp_path / "metrics.jsonl").stat().st_size
    tracemalloc.start()
    assert drop_later_records(tmp_path, 901) == 1000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [record.step for record in read_metrics(tmp_path)] == list(range(1, 901))
    assert peak < size / 2


@contextmanager
def full_disk_after(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `num_bytes`: a write up to there is cut, and one behind it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_no_record_and_is_warned_about_once(tmp_path: Path, caplog) -> None:
    tracker, path = JsonlTracker(tmp_path), tmp_path / "metrics.jsonl"
    tracker.log(1, {"reward/mean": 0.5})
    size = path.stat().st_size
    with full_disk_after(size + 20):
        for step in (2, 3, 4):
            tracker.log(step, {"reward/mean": 0.5})
        (warning,) = caplog.messages
        assert "metrics.jsonl cannot be written: File too large. Training goes on." in warning
        assert path.stat().st_size == size + 20, "the beginning of a line"
    tracker.log(5, {"reward/mean": 0.5})
    tracker.close()
    assert [record.step for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert [message.partition("metrics.jsonl")[2] for message in caplog.messages[1:]] == [
        " is written again; 0 records were lost meanwhile."
    ]


def test_what_a_full_disk_never_takes_is_counted_at_the_end(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_UNWRITTEN", 3)
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.5})
    with full_disk_after((tmp_path / "metrics.jsonl").stat().st_size):
        for step in range(2, 7):
            tracker.log(step, {"reward/mean": 0.5})
        tracker.close()
    assert [record.step for record in read_metrics(tmp_path)] == [1]
    assert "lacks 5 records" in caplog.messages[-1]


def test_a_full_disk_ends_no_run_at_its_trajectories_or_bad_batches(tmp_path: Path, caplog) -> None:
    with full_disk_after(100):
        table = TrajectoryTable(tmp_path)
        for step in (1, 2):
            table.write_step(step, [], version=step)
        assert BadBatches(tmp_path).write(1, [], {}) is None
    named = [Path(message.partition(" cannot be written")[0]).name for message in caplog.messages]
    assert named == ["step_000001.parquet", "1.parquet"], "the second file of a kind is not named again"
    assert not list(tmp_path.glob("*/*"))


def test_an_unwritable_run_directory_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackerError, match=r"metrics\.jsonl"):
        JsonlTracker(tmp_path / "file")


def test_background_records_arrive_in_order_and_the_sink_is_closed() -> None:
    sink = ListTracker()
    tracker = BackgroundTracker("fake", lambda: sink)
    for step in range(50):
        tracker.log(step, {"reward/mean": float(step)})
    tracker.log_summary({"steps": 50})
    tracker.close()
    assert [step for step, _ in sink.records] == list(range(50))
    assert sink.summaries == [{"steps": 50}]
    assert sink.is_closed
    assert tracker.num_lost == 0


def test_a_hanging_sink_does_not_block_and_its_overflow_is_counted_and_warned_about_once(caplog) -> None:
    gate = threading.Event()
    sink = ListTracker(gate=gate)
    tracker = BackgroundTracker("fake", lambda: sink, capacity=4)
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            tracker.log(step, {"reward/mean": 0.0})
        assert sum("queue of 4 records is full" in message for message in caplog.messages) == 1
        gate.set()
        tracker.close()
    assert tracker.num_lost + len(sink.records) == 20
    assert tracker.num_lost >= 15
    assert any(f"{tracker.num_lost} records never reached it" in message for message in caplog.messages)


def test_a_sink_that_hangs_for_ever_does_not_hold_up_closing(caplog) -> None:
    tracker = BackgroundTracker("fake", lambda: ListTracker(gate=threading.Event()), close_timeout_s=0.1)
    tracker.log(1, {"reward/mean": 0.0})
    tracker.close()
    assert any("did not finish" in message for message in caplog.messages)


def test_the_end_of_a_run_waits_longer_for_its_files_unless_a_signal_has_ended_it(caplog) -> None:
    waited = {}
    for status in ("completed", "interrupted"):
        sink = ListTracker(gate=threading.Event())
        tracker = BackgroundTracker("fake", lambda sink=sink: sink, close_timeout_s=0.1, files_timeout_s=1.0)
        tracker.log(1, {"reward/mean": 0.0})
        tracker.log_summary({"status": status})
        began_at = time.monotonic()
        tracker.close()
        waited[status] = time.monotonic() - began_at
    assert 0.1 <= waited["interrupted"] < waited["completed"]
    assert waited["completed"] >= 0.9
    assert all(
        "It was delivering the metrics of step 1; about 1 records wait behind that" in one for one in caplog.messages
    )


def test_a_failing_sink_is_warned_about_once_and_retried_until_it_takes_the_record(caplog) -> None:
    sink = ListTracker(num_failures=3)
    tracker = BackgroundTracker("fake", lambda: sink, first_backoff_s=0.001)
    tracker.log(1, {"reward/mean": 0.0})
    tracker.log(2, {"reward/mean": 0.0})
    deadline = time.monotonic() + 10
    while len(sink.records) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    tracker.close()
    assert [step for step, _ in sink.records] == [1, 2]
    assert tracker.num_lost == 0
    assert [message for message in caplog.messages if "no route" in message] == caplog.messages


def test_a_sink_that_never_opens_loses_everything_and_reports_how_much(caplog) -> None:
    def refuse():
        raise ConnectionError("no network")

    tracker = BackgroundTracker("fake", refuse, first_backoff_s=0.001)
    tracker.log(1, {"reward/mean": 0.0})
    tracker.log(2, {"reward/mean": 0.0})
    tracker.close()
    assert tracker.num_lost == 2
    assert sum("no network" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("mode", "environ", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ("offline", {"WANDB_API_KEY": "k"}, "offline"),
        ("online", {"WANDB_API_KEY": "k"}, "online"),
    ],
)
def test_wandb_is_online_with_a_key_and_offline_without(mode, environ, expected, tmp_path: Path) -> None:
    assert resolve_mode(WandbTrackerConfig(project="p", mode=mode), {"HOME": str(tmp_path), **environ}) == expected


def test_wandb_finds_a_key_in_netrc(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert resolve_mode(WandbTrackerConfig(project="penstock"), {"HOME": str(tmp_path)}) == "online"
    elsewhere = {"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.org"}
    assert resolve_mode(WandbTrackerConfig(project="penstock"), elsewhere) == "offline"


def test_wandb_online_without_a_key_is_refused_before_the_run(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"tracker\.wandb\.mode"):
        resolve_mode(WandbTrackerConfig(project="p", mode="online"), {"HOME": str(tmp_path)})
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = compose_config(["experiment=arithmetic", "tracker=[jsonl,wandb]", "tracker.wandb.mode=online"])
    (finding,) = check_trackers(config)
    assert (finding.severity, finding.message.partition(" ")[0]) == ("absent", "tracker.wandb.mode='online'")


OF_A_USER = """
class Rivers:
    def __init__(self, run_dir, run_name, config, *, project):
        import threading
        self.file = (run_dir / "rivers").open("a")
        print(run_name, config, project, threading.current_thread().name, file=self.file)

    def log(self, step, metrics):
        print(step, metrics, file=self.file)

    def log_summary(self, summary):
        print(summary["status"], file=self.file)

    def close(self):
        self.file.close()

NOTHING = 3
"""


def test_a_tracker_of_the_user_gets_all_records_in_a_thread_of_its_own(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "river_tracker.py").write_text(OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    own = FactoryTrackerConfig(factory="river_tracker:Rivers", args={"project": "p"})
    trackers = build_trackers(
        TrackerConfig(rivers=own), tmp_path / "run", "test", {"seed": 0}, lineage={"run": "a", "step": 2}
    )
    for tracker in trackers:
        tracker.log(1, {"reward/mean": 0.25})
        tracker.log_summary({"status": "completed"})
    for tracker in trackers:
        tracker.close()
    opened, *rest = (tmp_path / "run" / "rivers").read_text().splitlines()
    assert opened == "test {'seed': 0, 'branched_from': {'run': 'a', 'step': 2}} p tracker-rivers"
    assert rest == ["1 {'reward/mean': 0.25}", "completed"]


@pytest.mark.parametrize(
    ("factory", "args", "said"),
    [
        ("river_tracker:Rivers", {"project": "p"}, None),
        ("river_tracker:River", {}, "river_tracker has no attribute 'River'. Did you mean 'Rivers'?"),
        ("rivr_tracker:Rivers", {}, "no module 'rivr_tracker' on the import path."),
        ("river_tracker:NOTHING", {}, "is a int, which cannot be called. Name a function"),
        ("river_tracker:Rivers", {}, "but would be called with (run_dir, run_name, config): missing a required"),
        ("river_tracker:Rivers", {"project": "p", "team": 1}, "(run_dir, run_name, config, project=…, team=…): got an"),
    ],
)
def test_a_tracker_of_the_user_that_could_not_be_opened_is_refused_before_the_run(
    factory: str, args: dict[str, object], said: str | None, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "river_tracker.py").write_text(OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    typed = [f"tracker.rivers.args.{name}={value}" for name, value in args.items()]
    config = compose_config(["experiment=arithmetic", f"tracker.rivers.factory={factory}", *typed])
    found = [finding.message for finding in check_trackers(config)]
    assert len(found) == (said is not None)
    assert all(message.startswith("tracker.rivers.factory=") and str(said) in message for message in found)


def test_a_tracker_of_the_user_whose_import_ends_the_process_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "ending_tracker.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    config = compose_config(["experiment=arithmetic", "tracker.rivers.factory=ending_tracker:Rivers"])
    (finding,) = check_imports(config)
    assert finding.message.startswith(
        "tracker.rivers.factory='ending_tracker:Rivers': ending_tracker cannot be imported"
    )


@pytest.mark.parametrize(("name", "package"), [("mlflow", "mlflow"), ("trackio", "trackio")])
def test_a_tracker_whose_package_is_not_installed_is_named_before_the_run(name: str, package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    (finding,) = check_trackers(compose_config(["experiment=arithmetic", f"tracker=[jsonl,{name}]"]))
    assert finding.severity == "absent"
    assert f"pip install 'penstock[{name}]'" in finding.message


def write_steps(run_dir: Path, folder: str, num_steps: int, **columns: object) -> None:
    files = StepFiles(run_dir / folder, TRAJECTORY_SCHEMA)
    for step in range(1, num_steps + 1):
        files.write(step, [{"step": step, "task_id": f"task{row}", **columns} for row in range(20)])


def test_transcripts_are_spread_over_the_run_and_long_ones_lose_their_middle(tmp_path: Path) -> None:
    long = "a" * MAX_CHARACTERS + "b" * MAX_CHARACTERS
    write_steps(tmp_path, "trajectories", 100, prompt="1+1=", response=long)
    write_steps(tmp_path, "evaluations", 2, prompt="2+2=", response="4", reward=1.0)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in transcripts(tmp_path)]
    trained = [row for row in rows if row["from"] == "trajectories"]
    steps = sorted({row["step"] for row in trained})
    assert (len(steps), steps[0], steps[-1]) == (16, 1, 100)
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 7
    assert len(trained) == 16 * 16
    half = MAX_CHARACTERS // 2
    assert trained[0]["response"] == f"{'a' * half} … {MAX_CHARACTERS} characters … {'b' * half}"
    evaluated = [row for row in rows if row["from"] == "evaluations"]
    assert [(row["step"], row["task_id"]) for row in evaluated] == [
        (s, f"task{row}") for s in (1, 2) for row in range(16)
    ]
    assert {(row["prompt"], row["response"], row["reward"]) for row in evaluated} == {("2+2=", "4", 1.0)}


def test_files_are_uploaded_up_to_a_limit_the_page_first_and_the_rest_is_said(tmp_path: Path, caplog) -> None:
    write_steps(tmp_path, "trajectories", 5)
    write_steps(tmp_path, "evaluations", 1)
    (tmp_path / "report.html").write_text("<html>")
    size = (tmp_path / "trajectories" / "step_000005.parquet").stat().st_size
    chosen = [path.relative_to(tmp_path).as_posix() for path in run_artifacts(tmp_path, "wandb", 2 * size + 100)]
    assert chosen == ["report.html", "trajectories/step_000005.parquet", "trajectories/step_000004.parquet"]
    (message,) = caplog.messages
    assert "tracker wandb: 4 of 7 files of the run" in message
    caplog.clear()
    assert len(run_artifacts(tmp_path, "wandb")) == 7
    assert caplog.messages == []


@pytest.mark.full
def test_wandb_has_the_page_the_transcripts_and_the_run_that_this_one_was_branched_from(
    tmp_path: Path, monkeypatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    parent, run_dir = tmp_path / "parent", tmp_path / "run"
    parent.mkdir()
    (parent / "wandb_run_id").write_text("parentid")
    write_steps(run_dir, "trajectories", 2, prompt="1+1=", response="the answer is 2")
    (run_dir / "report.html").write_text("<html>")
    lineage = {"run": str(parent), "step": 20, "restored": "all"}
    config = TrackerConfig(wandb=WandbTrackerConfig(project="penstock"))
    for first_step in (0, 2):
        jsonl_tracker, wandb = build_trackers(config, run_dir, "t", {}, first_step=first_step, lineage=lineage)
        for tracker in (jsonl_tracker, wandb):
            tracker.log(first_step, {"reward/mean": 0.25})
            tracker.log_summary({"status": "completed"})
        assert isinstance(wandb, BackgroundTracker)
        wandb._give_up_at = time.monotonic() + 60.0
        for tracker in (jsonl_tracker, wandb):
            tracker.close()
        assert wandb.num_lost == 0
    logs = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {path.stem for path in logs} == {f"run-{(run_dir / 'wandb_run_id').read_text()}"}, "one run, resumed once"
    assert len(logs) == 2
    for log in logs:
        content = log.read_bytes()
        assert all(word in content for word in (b"parentid", b"branch of parent", b"from step 20", b"report.html"))
        files = {path.relative_to(log.parent).as_posix() for path in log.parent.rglob("*") if path.is_file()}
        assert {"artifact/report.html", "artifact/trajectories/step_000002.parquet"} <= files
        (table,) = (log.parent / "files" / "media" / "table").glob("transcripts_*.json")
        assert len(json.loads(table.read_text())["data"]) == 32


@pytest.mark.full
def test_all_three_sinks_really_write(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    wandb = WandbTrackerConfig(project="penstock", entity="the-rivers")
    config = TrackerConfig(wandb=wandb, tensorboard=TensorboardTrackerConfig())
    run_dir = tmp_path / "run"
    trackers = build_trackers(config, run_dir, "test", {"seed": 0, "model": {"path": None}})
    for tracker in trackers:
        tracker.log(1, {"reward/mean": 0.25})
        tracker.log_summary({"steps": 1, "eval_after": None, "ledger": {"admitted": 1}})
    for tracker in trackers:
        if isinstance(tracker, BackgroundTracker):  # on a busy machine W&B takes longer to start than a run would wait
            monkeypatch.setattr(tracker, "_give_up_at", time.monotonic() + 60.0)
        tracker.close()
    assert [record.metrics for record in read_metrics(run_dir)] == [{"reward/mean": 0.25}]
    (events,) = (run_dir / "tensorboard").glob("events.out.tfevents.*")
    assert b"reward/mean" in events.read_bytes()
    (transaction_log,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    assert all(word in transaction_log.read_bytes() for word in (b"reward/mean", b"penstock", b"the-rivers"))
    assert [record for record in caplog.records if record.name.startswith("penstock")] == []
