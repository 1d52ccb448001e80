"""`sft → easy → hard` in one command: the policy is made first, then the stages are trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.platform.metrics.trajectory_table import read_trajectories
from tests.command_line import read_metric, read_summary, run_cli

pytestmark = [pytest.mark.integration, pytest.mark.full]

SFT = ["experiment=arithmetic_sft", "trainer.backend=torch", "sft.max_steps=4", "sft.eval_tasks=8", "sft.batch_size=8"]
STAGES = [
    "experiment=arithmetic_stages",
    f"warm_start={json.dumps(SFT)}",
    "rollout/engine=torch",
    "trainer.backend=torch",
    "total_steps=8",
    "dataflow.batch_groups=2",
    "dataflow.group_size=2",
    "evaluation.num_tasks=2",
    "evaluation.every_steps=0",
    "env.streams.easy.gate=0.0",  # any two groups pass it
    "env.streams.easy.gate_groups=2",
    "seed=3",
]


def test_one_command_makes_the_policy_and_trains_it_stage_by_stage(tmp_path: Path) -> None:
    done = run_cli("train", *STAGES, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    start, run_dir = tmp_path / "runs" / "arithmetic_sft-seed3", tmp_path / "runs" / "arithmetic_stages"
    assert (start / "policy" / "model.safetensors").exists()
    assert len(read_metric(start, "sft/loss")) == 4
    assert read_summary(run_dir)["trained_groups"] == 16
    by_step = [read_trajectories(path) for path in sorted((run_dir / "trajectories").glob("step_*.parquet"))]
    three_digits = [any(re.search(r"\d{3}", row["prompt"]) for row in rows) for rows in by_step]
    assert not three_digits[0], "the first stage has sums of two digits"
    assert any(three_digits), "the second one was reached"
    assert "stage hard begins at v" in done.stdout
    assert read_metric(run_dir, "stream/weight/hard")[-1] == 1.0
    again = run_cli("train", *STAGES, "name=again", "--dry-run", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "does not exist yet" not in again.stdout, "a policy that is there is used"


def test_a_warm_start_that_cannot_run_is_reported_before_anything_is_created(tmp_path: Path) -> None:
    broken = run_cli("train", *STAGES, 'warm_start=["experiment=arithmetic_sft","sft.batch_size=0"]', cwd=tmp_path)
    assert broken.returncode == 2
    assert "warm_start: sft.batch_size=0" in broken.stderr
    planned = run_cli("train", *STAGES, "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0
    assert "does not exist yet: `penstock sft experiment=arithmetic_sft" in planned.stdout
    elsewhere = run_cli("train", *STAGES, "model.path=runs/other", cwd=tmp_path)
    assert elsewhere.returncode == 2
    assert "model.path=runs/other does not end in /policy" in elsewhere.stderr
    assert not (tmp_path / "runs").exists()
