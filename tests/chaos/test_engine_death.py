"""An engine's process is killed while it samples: the run continues without it or after a restart; nothing is lost."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from tests.chaos.processes import start_train, wait_for_line
from tests.command_line import read_metric, read_summary
from tests.tiny_policy import tiny_shape

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

SHAPE = tiny_shape(vocab_size=32, hidden_size=256, head_dim=64)  # a token takes it milliseconds
STEPS, BATCH = 12, 12


@pytest.mark.parametrize(
    ("engines", "restarts"),
    [
        # An everyday run loses one in test_random_kills.py, and one is restarted in test_publish_faults.py.
        pytest.param(2, 0, id="one_of_two_for_good", marks=pytest.mark.full),
        pytest.param(1, 2, id="the_only_one", marks=pytest.mark.full),
    ],
)
def test_a_killed_engine_costs_no_trajectory(engines: int, restarts: int, workspace: Path, tmp_path: Path) -> None:
    name, policy = f"killed_one_of_{engines}", tmp_path / "policy"
    # Untrained, it answers with dozens of tokens, not with 4: there is something to keep.
    create_policy(ModelConfig(max_context_tokens=128, shape=SHAPE), character_tokenizer(), str(policy), seed=0)
    process = start_train(
        workspace,
        "experiment=arithmetic",
        f"model.path={policy}",
        "evaluation.num_tasks=8",
        "evaluation.every_steps=0",
        f"name={name}",
        "rollout/engine=torch",
        f"rollout.num_engines={engines}",
        f"rollout.max_engine_restarts_per_hour={restarts}",
        "rollout.engine.journal_interval_tokens=1",
        "rollout.engine.max_num_seqs=8",  # generation takes a while, and some of its requests have tokens when it dies
        "dataflow=asynchronous",  # with less ahead of the trainer, two engines work too briefly to be seen at work
        f"dataflow.batch_groups={BATCH}",
        f"total_steps={STEPS}",
    )
    try:
        wait_for_line(process, f" 2/{STEPS}", 120)
        found = [child for child in psutil.Process(process.pid).children(recursive=True) if is_engine(child)]
        assert len(found) == engines, found
        wait_until_it_works(found[0])
        found[0].kill()
        stdout, stderr = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0, stderr
    run_dir = workspace / "runs" / name
    summary = read_summary(run_dir)
    ledger = summary["ledger"]
    assert summary["status"] == "completed"
    assert ledger["trained"] == STEPS * BATCH
    assert ledger["failed"] == 0, "trajectories resume on the other engine, or on the new one"
    assert read_metric(run_dir, "flow/engine_restarts")[-1] == (1 if restarts else 0)
    assert ledger["admitted"] == sum(ledger[end] for end in ("trained", "dropped", "filtered", "failed", "live"))
    assert summary["max_staleness_seen"] <= summary["max_staleness_configured"]
    assert read_metric(run_dir, "flow/resumed_trajectories")[-1] > 0
    assert "is fenced and gets no more requests" in stdout + stderr
    assert "Traceback" not in stderr, stderr
    assert "(raylet)" not in stdout + stderr, "what was lost is said once, by the run"


def wait_until_it_works(engine: psutil.Process) -> None:
    """It has nothing to generate while the trainer is further behind than the bound on staleness allows.

    Taking a version keeps it busy for a moment too; only generation does so for a second, also on a busy machine.
    """
    num_busy = 0
    for _ in range(600):
        num_busy = num_busy + 1 if engine.cpu_percent(interval=0.05) > 20 else 0
        if num_busy == 20:
            return
    raise AssertionError("the engine generated nothing for 30 s")


def is_engine(process: psutil.Process) -> bool:
    return any("EngineActor" in part for part in process.cmdline())
