"""An engine's process is killed while it samples: the run goes on without it, and nothing is lost or trained twice."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.chaos.processes import start_train, wait_for_line
from tests.command_line import read_metric, read_summary

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

STEPS, BATCH = 6, 12


def test_a_killed_engine_costs_no_trajectory(workspace: Path, train_overrides: list[str]) -> None:
    process = start_train(
        workspace,
        *train_overrides,
        "name=killed_engine",
        "rollout/engine=torch",
        "rollout.num_engines=2",
        "rollout.engine.journal_interval_tokens=4",
        "rollout.engine.max_num_seqs=8",  # generation is the bottleneck: the engine is busy when it dies
        f"dataflow.batch_groups={BATCH}",
        f"total_steps={STEPS}",
    )
    try:
        wait_for_line(process, f" 2/{STEPS}", 120)
        engines = [child for child in psutil.Process(process.pid).children(recursive=True) if is_engine(child)]
        assert len(engines) == 2, engines
        engines[0].kill()
        stdout, stderr = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0, stderr
    run_dir = workspace / "runs" / "killed_engine"
    summary = read_summary(run_dir)
    ledger = summary["ledger"]
    assert summary["status"] == "completed"
    assert ledger["trained"] == STEPS * BATCH
    assert ledger["failed"] == 0, "trajectories resume on the other engine"
    assert ledger["admitted"] == sum(ledger[end] for end in ("trained", "dropped", "filtered", "failed", "live"))
    assert summary["max_staleness_seen"] <= summary["max_staleness_configured"]
    assert read_metric(run_dir, "flow/resumed_trajectories")[-1] > 0
    assert "fenced off" in stdout + stderr
    assert "Traceback" not in stderr, stderr


def is_engine(process: psutil.Process) -> bool:
    return any("EngineActor" in part for part in process.cmdline())
