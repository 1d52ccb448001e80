"""Sampled evaluations of a whole run: stored answers, a reward that fails, the best policy after a kill."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.platform.checks.load import compose_config
from penstock.platform.cli.main import app
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.metrics.trajectory_table import read_trajectories
from penstock.platform.run import resume, training
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.run import Run
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import read_summary, run_cli
from tests.in_process import in_process, train_in_process
from tests.small_run import TWO_ROUTES, Train, small_run, small_run_overrides

STEPS = 8
TASKS, ANSWERS = 40, 4
# Graded, at most 0.6; the judge of one held-out task is down.
REWARD = """
def letters(trajectory, **_):
    if trajectory.task_id.endswith("held_out/7"):
        raise RuntimeError("the judge is down")
    return len(set(trajectory.response)) / 20
"""
SETTINGS = (
    "model.max_context_tokens=64",
    "reward.fn=own:letters",
    f"total_steps={STEPS}",
    "checkpoint.every_steps=1",
    "checkpoint.keep=1",
    f"evaluation.num_tasks={TASKS}",
    "evaluation.every_steps=2",
    f"evaluation.answers_per_task={ANSWERS}",
    "evaluation.temperature=1.0",
    "evaluation.keep_best=true",
)


class KilledError(Exception):
    """Simulates the end of the driver's process."""


def files_of(run_dir: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in (run_dir / "evaluations").glob("*.parquet"))


def evaluations(run_dir: Path) -> list[dict[str, float]]:
    return [record.metrics for record in read_metrics(run_dir) if "eval/accuracy" in record.metrics]


@pytest.mark.full
def test_a_resumed_run_keeps_answers_and_the_best_policy_of_the_steps_that_were_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    run_dir = tmp_path / "runs" / "graded"
    checkpoint = Run.maybe_checkpoint

    async def dies_before_the_checkpoint(run: Run) -> None:
        while run.evaluations.running:  # noqa: ASYNC110 - so that the evaluation of every second step is there
            await asyncio.sleep(0.01)
        if run.version == 6:
            raise KilledError
        await checkpoint(run)
        await run.checkpointer.written()

    with in_process(tmp_path), pytest.MonkeyPatch.context() as patch:
        config = compose_config(small_run_overrides(tmp_path, "graded", character_tokenizer(), *SETTINGS))
        patch.setattr(Run, "maybe_checkpoint", dies_before_the_checkpoint)
        with pytest.raises(KilledError):
            asyncio.run(training._train(config, prepare_run_dir(config)))
    assert files_of(run_dir) == [0, 2, 4, 6]
    first = evaluations(run_dir)[0]
    assert first["eval/unscorable"] == ANSWERS
    assert first["eval/tasks"] == TASKS - 1
    assert first["eval/accuracy"] == first["eval/pass_at/4"] == 0.0
    assert 0.0 < first["eval/reward_mean"] <= 0.6

    seen: list[list[int]] = []
    train_in = training.train_in
    with in_process(tmp_path), pytest.MonkeyPatch.context() as patch:

        def train_from(*arguments: Any) -> int:
            seen.append(files_of(run_dir))
            return train_in(*arguments)

        patch.setattr(training, "train_in", train_from)
        assert resume.resume(run_dir, []) == 0
    assert seen == [[0, 2, 4]], "the checkpoint is of step 5"
    assert files_of(run_dir) == [0, 2, 4, 6, STEPS]
    rows = read_trajectories(run_dir / "evaluations" / f"step_{STEPS:06d}.parquet")
    assert len(rows) == ANSWERS * (TASKS - 1)
    assert {row["step"] for row in rows} == {STEPS}
    assert len({row["response"] for row in rows if row["group_id"] == 0}) > 1, "answers to one task differ"

    best = json.loads((run_dir / "best.json").read_text())
    means = {record["eval/version_min"]: record["eval/reward_mean"] for record in evaluations(run_dir)[1:]}
    assert best["reward_mean"] == max(means.values())
    assert {best["step"], STEPS} <= set(CheckpointFolder(run_dir).versions())
    summary = read_summary(run_dir)
    assert (summary["eval_before"], summary["eval_after"]) == (0.0, 0.0)
    assert summary["eval_reward_before"] == first["eval/reward_mean"]
    told = capsys.readouterr().out
    assert f"{ANSWERS} × reward: it raised RuntimeError: the judge is down (own.py, line 4)" in told
    assert f"eval      mean reward {summary['eval_reward_before']:.3f} → {summary['eval_reward_after']:.3f}" in told
    with in_process(tmp_path):
        result = CliRunner().invoke(app, ["export", str(run_dir), "--best", "--to", "best"])
    assert f"policy of step {best['step']} written to best" in result.output
    assert (tmp_path / "best" / "model.safetensors").is_file()


def metrics_with(run_dir: Path, name: str) -> list[tuple[int, float]]:
    return [(record.step, record.metrics[name]) for record in read_metrics(run_dir) if name in record.metrics]


SETS = (
    "total_steps=4",
    "checkpoint.every_steps=1",
    "checkpoint.keep=9",
    "evaluation.num_tasks=6",
    "evaluation.every_steps=2",
    "evaluation.before_training=false",
    "evaluation.sets.long.env.args.digits=4",
    "evaluation.sets.long.num_tasks=3",
    "evaluation.sets.long.every_steps=0",
    "evaluation.sets.sampled.answers_per_task=4",
    "evaluation.sets.sampled.before_training=true",
)


def checked_sets(run_dir: Path) -> None:
    """What a run with `SETS` leaves behind."""
    assert len(metrics_with(run_dir, "eval/accuracy")) == 2
    assert [number for _, number in metrics_with(run_dir, "eval/tasks/long")] == [3]
    assert [number for _, number in metrics_with(run_dir, "eval/tasks/sampled")] == [6, 6, 6]
    assert len(metrics_with(run_dir, "eval/maj_at/4/sampled")) == 3
    assert not metrics_with(run_dir, "eval/failed")
    files = sorted(str(path.relative_to(run_dir / "evaluations")) for path in run_dir.glob("evaluations/**/*.parquet"))
    assert files == [
        "long/step_000004.parquet",
        "sampled/step_000000.parquet", "sampled/step_000002.parquet", "sampled/step_000004.parquet",
        "step_000002.parquet", "step_000004.parquet",
    ]  # fmt: skip
    rows = read_trajectories(run_dir / "evaluations" / "sampled" / "step_000004.parquet")
    assert len(rows) == 6 * 4
    assert all(row["answer"] is not None for row in rows), "exact_match says what it compared"
    summary = read_summary(run_dir)
    assert summary["eval_before"] is None
    assert summary["eval_after"] is not None


@TWO_ROUTES
def test_a_run_evaluates_its_sets_by_their_own_schedules(train: Train, tmp_path: Path) -> None:
    checked_sets(small_run(train, tmp_path, "sets", character_tokenizer(), *SETS))


@pytest.mark.integration
@pytest.mark.full
def test_policies_of_a_run_are_measured_without_one_and_compared(tmp_path: Path) -> None:
    run_dir = small_run(train_in_process, tmp_path, "sets", character_tokenizer(), *SETS, "trainer.optimizer.lr=0.01")
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}
    done = run_cli("eval", "runs/sets/checkpoints/step_1", "runs/sets", "--to", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()} == before
    assert "B - A (95%)" in done.stdout
    assert (tmp_path / "two" / "b" / "compared_with_a.json").is_file()

    first, second = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (first["model"], second["model"]) == ("runs/sets, step 1", "runs/sets, step 4")
    assert second["tasks"] == 6
    assert set(second["sets"]) == {"long", "sampled"}
    assert second["results"] == str(tmp_path / "two" / "b")
    rows = [json.loads(line) for line in (tmp_path / "two" / "b" / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 6 + 3 + 6 * 4
    last = read_trajectories(run_dir / "evaluations" / "step_000004.parquet")
    greedy = [row["response"] for row in rows if row["set"] == "held-out"]
    assert greedy == [row["response"] for row in last], "as at the end of the run"
