"""The only reward worker is killed while it scores: the next process scores the same trajectories again."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.chaos.processes import start_train, wait_for_line
from tests.command_line import read_metric, read_summary
from tests.small_run import small_run_overrides

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full]

STEPS, BATCH, GROUP = 6, 4, 4

SLOW_REWARD = """
import time

def fn(trajectory, **_):
    time.sleep(0.1)  # scoring is the bottleneck: the worker is busy when it dies
    return len(trajectory.response) % 2
"""


def test_a_killed_reward_worker_costs_no_group_and_no_sample(tmp_path: Path) -> None:
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    overrides = small_run_overrides(
        tmp_path,
        "killed",
        character_tokenizer(),
        "reward.fn=slow_reward.fn",
        "reward.num_workers=1",
        f"dataflow.batch_groups={BATCH}",
        f"dataflow.group_size={GROUP}",
        f"total_steps={STEPS}",
    )
    process = start_train(tmp_path, *overrides)
    try:
        wait_for_line(process, f" 2/{STEPS}", 120)
        (worker,) = [child for child in psutil.Process(process.pid).children(recursive=True) if is_reward_worker(child)]
        worker.kill()
        stdout, stderr = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0, stderr
    run_dir = tmp_path / "runs" / "killed"
    summary = read_summary(run_dir)
    ledger = summary["ledger"]
    assert summary["status"] == "completed"
    assert ledger["trained"] == STEPS * BATCH
    assert ledger["failed"] == 0
    assert ledger["admitted"] == sum(ledger[end] for end in ("trained", "dropped", "filtered", "failed", "live"))
    assert read_metric(run_dir, "flow/retries/reward")[-1] == 0, "scored again, not sampled again"
    assert "reward worker 0 with" in stdout + stderr
    assert "Traceback" not in stderr, stderr
    assert "(raylet)" not in stdout + stderr, "what was lost is said once, by the run"


def is_reward_worker(process: psutil.Process) -> bool:
    return any("RewardActor" in part for part in process.cmdline())
