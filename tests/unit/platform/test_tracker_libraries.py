"""MLflow and Trackio, with the real libraries and without network: what they have of a run, and of a resumed one."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.platform.checks.load import compose_config
from penstock.platform.metrics.trackers.base import BackgroundTracker
from penstock.platform.metrics.trackers.build import build_trackers
from penstock.platform.metrics.trackers.config import MlflowTrackerConfig, TrackerConfig, TrackioTrackerConfig
from penstock.platform.metrics.trackers.mlflow import MlflowTracker, valid_name
from penstock.platform.metrics.trajectory_table import TRAJECTORY_SCHEMA, StepFiles

OF_MLFLOW = MlflowTrackerConfig(experiment="rivers")
SUMMARY = {"status": "completed", "ended_by": None, "steps": 3, "ledger": {"admitted": 12}}
METRICS = {"eval/accuracy": 0.25, "eval/accuracy/algebra": 0.5, "reward/part/a@b": float("nan")}
"""Two of these names could not be files next to each other, and MLflow takes no `@`."""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def log_run(
    config: TrackerConfig, run_dir: Path, steps: Sequence[int], resolved: dict[str, Any] | None = None, **how: Any
) -> None:
    """Log these steps as a run does, from its first step on, and end it."""
    run_dir.mkdir(exist_ok=True)
    trackers = build_trackers(config, run_dir, "test", resolved or {"seed": 0}, first_step=steps[0], **how)
    for tracker in trackers:
        for step in steps:
            tracker.log(step, {**METRICS, "reward/mean": step / 10})
        tracker.log_summary(SUMMARY)
        if isinstance(tracker, BackgroundTracker):  # on a busy machine imports take longer than a run would wait
            tracker._give_up_at = time.monotonic() + 120.0
    for tracker in trackers:
        tracker.close()
        assert not isinstance(tracker, BackgroundTracker) or tracker.num_lost == 0


def mlflow_client(store: str) -> Any:
    return pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed").MlflowClient(store)


def client_of(run_dir: Path) -> Any:
    return mlflow_client(f"sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}")


def mlflow_run(run_dir: Path, client: Any) -> Any:
    return client.get_run((run_dir / "mlflow_run_id").read_text())


def test_mlflow_has_every_step_the_configuration_the_summary_and_the_files_and_a_resumed_run_continues(
    tmp_path: Path, caplog, capfd
) -> None:
    client, run_dir = client_of(tmp_path), tmp_path / "run"
    files = StepFiles(run_dir / "trajectories", TRAJECTORY_SCHEMA)
    files.write(1, [{"step": 1, "prompt": "1+1=", "response": "2"}])
    (run_dir / "report.html").write_text("<html>")
    capfd.readouterr()
    resolved = compose_config(["experiment=arithmetic"]).model_dump(mode="json")
    log_run(TrackerConfig(mlflow=OF_MLFLOW), run_dir, [0, 1, 2], resolved)
    first = mlflow_run(run_dir, client_of(run_dir))
    log_run(TrackerConfig(mlflow=OF_MLFLOW), run_dir, [2, 3], resolved | {"total_steps": 7777})

    client = client_of(run_dir)
    run = mlflow_run(run_dir, client)
    assert run.info.run_id == first.info.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "test")
    assert client.get_experiment(run.info.experiment_id).name == "rivers"
    history = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "reward/mean")]
    assert history == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)], "step 2 is not sent again"
    assert {"eval/accuracy", "eval/accuracy/algebra", "reward/part/a_b"} <= set(run.data.metrics)
    assert run.data.metrics["summary/ledger/admitted"] == 12
    assert run.data.tags["summary/status"] == "completed"
    assert run.data.params["trainer.optimizer.lr"] == json.dumps(resolved["trainer"]["optimizer"]["lr"])
    assert run.data.params["total_steps"] == str(resolved["total_steps"]), "MLflow allows no other value"
    assert run.data.tags["penstock.changed"] == "total_steps=7777"
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {"report.html", "trajectories"}
    kept = client.list_artifacts(run.info.run_id, "trajectories")
    assert [one.path for one in kept] == ["trajectories/step_000001.parquet"]
    assert [record for record in caplog.records if record.name.startswith("penstock")] == []
    assert capfd.readouterr() == ("", "")
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "mlflow"}, "nothing is written where a run is started"


def test_mlflow_shows_a_branch_below_its_parent_if_both_are_in_one_store(tmp_path: Path, monkeypatch) -> None:
    store = f"sqlite:///{tmp_path / 'all.db'}"
    client = mlflow_client(store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    lineage = {"run": str(tmp_path / "parent"), "step": 20, "restored": ["weights", "optimizer"]}
    log_run(TrackerConfig(mlflow=OF_MLFLOW), tmp_path / "parent", [0])
    log_run(TrackerConfig(mlflow=OF_MLFLOW), tmp_path / "child", [0], lineage=lineage)
    parent, child = mlflow_run(tmp_path / "parent", client), mlflow_run(tmp_path / "child", client)
    assert child.info.run_id != parent.info.run_id
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.data.tags["branched_from.mlflow_run_id"] == parent.info.run_id
    assert child.data.tags["branched_from.step"] == "20"
    assert not (tmp_path / "child" / "mlflow").exists()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    log_run(TrackerConfig(mlflow=OF_MLFLOW), tmp_path / "other", [0], lineage=lineage)
    other = mlflow_run(tmp_path / "other", client_of(tmp_path / "other"))
    assert "mlflow.parentRunId" not in other.data.tags, "the parent is in another store"
    assert other.data.tags["branched_from.mlflow_run_id"] == parent.info.run_id


def test_mlflow_cuts_what_is_too_long_says_how_much_and_logs_a_new_run_if_its_own_is_gone(
    tmp_path: Path, caplog
) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    (tmp_path / "mlflow_run_id").write_text("0" * 32)
    resolved = {"env": {"args": {"rows": "x" * 7000}}, **{f"key{number}": number for number in range(250)}}
    tracker = MlflowTracker(OF_MLFLOW, tmp_path, "test", resolved)
    tracker.log(1, {f"reward/part/{number}": 0.0 for number in range(1500)})
    tracker.close()
    run = mlflow_run(tmp_path, client_of(tmp_path))
    assert len(run.data.params) == 251
    assert run.data.params["env.args.rows"] == "x" * 6000
    assert len(run.data.metrics) == 1500
    gone, cut = (record.getMessage() for record in caplog.records if record.name.startswith("penstock"))
    assert "its run 00000000000000000000000000000000 is not in this store" in gone
    assert "1 of 251 values of the configuration are longer than MLflow's limit of 6000 characters" in cut


@pytest.mark.parametrize(
    "name",
    ["eval/pass_at/8/a b", "a@b", "reward/part//x", "a/../b", "/a", "a/", "x/" * 200, "reward/part/π", "…/.", "a:b/-c"],
)
def test_every_name_of_ours_is_one_that_mlflow_takes(name: str) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    from mlflow.utils.validation import _validate_length_limit, _validate_metric_name

    _validate_metric_name(valid_name(name))
    _validate_length_limit("name", 250, valid_name(name))


def test_mlflow_without_its_server_delays_no_run_and_what_it_lacks_is_counted(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    jsonl, mlflow = build_trackers(TrackerConfig(mlflow=OF_MLFLOW), tmp_path, "test", {"seed": 0})
    mlflow.log(1, METRICS)
    mlflow.log_summary(SUMMARY)
    for tracker in (mlflow, jsonl):
        tracker.close()
    assert isinstance(mlflow, BackgroundTracker)
    assert mlflow.num_lost == 2
    said = [record.getMessage() for record in caplog.records if record.name.startswith("penstock")]
    assert len(said) == 2
    assert "127.0.0.1" in said[0]
    assert "2 records never reached it" in said[1]


def test_trackio_has_every_step_and_runs_of_one_name_stay_apart_until_one_is_resumed(
    tmp_path: Path, monkeypatch, caplog, capfd
) -> None:
    pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):  # read from TRACKIO_DIR when the library is imported
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    config = TrackerConfig(trackio=TrackioTrackerConfig(project="rivers"))
    first, second = tmp_path / "first", tmp_path / "second"
    log_run(config, first, [0, 1, 2])
    log_run(config, second, [0], lineage={"run": str(first), "step": 2, "restored": "all"})
    log_run(config, first, [2, 3])

    storage, names = sqlite_storage.SQLiteStorage, [(path / "trackio_run").read_text() for path in (first, second)]
    assert sorted(storage.get_runs("rivers")) == sorted(names)
    assert all(name.startswith("test-") for name in names)
    logs = storage.get_logs("rivers", names[0])
    assert [(one["step"], one["reward/mean"]) for one in logs if "reward/mean" in one] == [
        (0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)
    ]  # fmt: skip
    assert {one["step"] for one in logs if one.get("summary/ledger/admitted") == 12} == {2, 3}
    assert {"eval/accuracy", "eval/accuracy/algebra", "reward/part/a@b"} <= set(logs[0])
    configured = storage.get_run_config("rivers", names[1])
    assert configured["seed"] == 0
    assert configured["branched_from"] == {"run": str(first), "step": 2, "restored": "all", "trackio_run": names[0]}
    with sqlite3.connect(tmp_path / "trackio" / "rivers.db") as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        assert not any(database.execute(f"select count(*) from {one}").fetchone()[0] for one in tables if "sys" in one)
    assert [record for record in caplog.records if record.name.startswith("penstock")] == []
    assert capfd.readouterr() == ("", "")
