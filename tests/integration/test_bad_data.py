"""A datum that cannot be sampled costs its group, on the real engine; the run goes on and says what was wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import read_metric, read_summary, run_cli

pytestmark = pytest.mark.integration

STEPS, BATCH = 12, 100
BAD_TASKS = """
from dataclasses import replace
from penstock.envs.arithmetic import ArithmeticTasks

class BadTasks(ArithmeticTasks):
    def train(self):  # beyond the tasks that are looked at before a run starts
        for index, task in enumerate(super().train()):
            if index == 1100:
                task = replace(task, task_id="too/long", prompt="1+" * 200 + "1=")
            if index == 1110:
                task = replace(task, task_id="not/text", prompt="1 plus 1 =")
            yield task
"""


@pytest.mark.parametrize("engines", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_prompt_beyond_the_context_fails_its_group_alone(
    engines: int, workspace: Path, train_overrides: list[str]
) -> None:
    (workspace / "bad_tasks.py").write_text(BAD_TASKS)
    name = f"bad_data_{engines}"
    done = run_cli(
        "train",
        *train_overrides,
        f"name={name}",
        "env.factory=bad_tasks:BadTasks",
        "model.max_context_tokens=128",
        f"rollout.num_engines={engines}",
        "rollout.max_engine_restarts=0",
        "rollout.sampling.max_new_tokens=8",
        f"dataflow.batch_groups={BATCH}",
        "dataflow.group_size=2",
        "evaluation.num_tasks=16",
        f"total_steps={STEPS}",
        cwd=workspace,
    )
    assert done.returncode == 0, done.stderr
    run_dir = workspace / "runs" / name
    summary = read_summary(run_dir)
    assert summary["status"] == "completed"
    assert summary["ledger"]["trained"] == STEPS * BATCH
    failures = json.loads((run_dir / "failures.json").read_text())
    assert summary["ledger"]["failed"] == len(failures) == 2
    assert {failure["kind"] for failure in failures} == {"env"}
    too_long, not_text = (failure["detail"] for failure in failures)
    assert all(number in too_long for number in ("402", "128")), too_long
    assert "not/text" in not_text or "plus" in not_text, not_text
    assert read_metric(run_dir, "flow/engine_restarts")[-1] == 0
    assert "fenced" not in done.stdout + done.stderr
