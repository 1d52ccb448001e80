"""A task that cannot be sampled costs its group, on the real engine; the run continues and reports the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import read_metric, read_summary, run_cli
from tests.in_process import train_in_process
from tests.small_run import small_run_overrides

STEPS, BATCH = 12, 100
BAD_TASKS = """
from dataclasses import replace
from penstock.envs.tasks.arithmetic import ArithmeticTasks

class BadTasks(ArithmeticTasks):
    def train(self):  # beyond the tasks that are looked at before a run starts
        for index, task in enumerate(super().train()):
            if index == 1100:
                task = replace(task, task_id="too/long", prompt="1+" * 200 + "1=")
            if index == 1110:
                task = replace(task, task_id="not/text", prompt="1 plus 1 =")
            yield task
"""


OVERRIDES = [
    "env.factory=bad_tasks:BadTasks",
    "model.max_context_tokens=128",
    "rollout.max_engine_restarts_per_hour=0",
    "rollout.sampling.max_new_tokens=8",
    f"dataflow.batch_groups={BATCH}",
    "dataflow.group_size=2",
    "evaluation.num_tasks=16",
    "env.on_long_prompt=error",
    f"total_steps={STEPS}",
]


@pytest.mark.full
def test_a_prompt_beyond_the_context_fails_its_group_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad_tasks.py").write_text(BAD_TASKS)
    train_in_process(tmp_path, small_run_overrides(tmp_path, "bad_data", character_tokenizer(), *OVERRIDES))
    fails_two_groups_alone(tmp_path / "runs" / "bad_data", "".join(capfd.readouterr()))


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize("engines", [1, 2])
def test_so_it_does_in_engines_of_vllm(engines: int, workspace: Path, train_overrides: list[str]) -> None:
    (workspace / "bad_tasks.py").write_text(BAD_TASKS)
    name = f"bad_data_{engines}"
    overrides = [*train_overrides, *OVERRIDES, f"name={name}", f"rollout.num_engines={engines}"]
    done = run_cli("train", *overrides, cwd=workspace)
    assert done.returncode == 0, done.stderr
    fails_two_groups_alone(workspace / "runs" / name, done.stdout + done.stderr)


def fails_two_groups_alone(run_dir: Path, output: str) -> None:
    summary = read_summary(run_dir)
    assert summary["status"] == "completed"
    assert summary["ledger"]["trained"] == STEPS * BATCH
    failures = json.loads((run_dir / "failures.json").read_text())
    assert summary["ledger"]["failed"] == len(failures) == 2
    assert {failure["kind"] for failure in failures} == {"env", "long_prompt"}
    too_long, not_text = (failure["detail"] for failure in failures)
    assert all(number in too_long for number in ("402", "128")), too_long
    assert "not/text" in not_text or "plus" in not_text, not_text
    assert read_metric(run_dir, "flow/engine_restarts")[-1] == 0
    assert "fenced" not in output
