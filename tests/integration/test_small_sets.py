"""Runs on very few rows, without evaluation, evaluated on their training rows, and with groups of one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock.platform.checks.load import load_config
from penstock.platform.metrics.comparison import compare
from penstock.platform.metrics.report import write_report
from penstock.platform.metrics.run_record import read_run
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.run import resume, training
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import byte_tokenizer
from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from tests.command_line import read_summary
from tests.in_process import in_process
from tests.tiny_policy import tiny_shape


def train(folder: Path, num_rows: int, *overrides: str, steps: int = 2) -> Path:
    """`experiment=text` on so many rows, in this process; the folder of the run."""
    tokenizer = byte_tokenizer()
    shape = tiny_shape(vocab_size=len(tokenizer), hidden_size=32, head_dim=16)
    create_policy(ModelConfig(max_context_tokens=512, shape=shape), tokenizer, str(folder / "policy"), seed=0)
    (folder / "own.py").write_text("def letters(trajectory, **_):\n    return len(set(trajectory.response)) / 20\n")
    rows = [{"prompt": f"{index}+1=", "answer": str(index + 1)} for index in range(num_rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["env=dataset", "env.args.path=rows.jsonl", "reward.fn=own:letters", "rollout/engine=torch", "trainer=torch"]
    own += ["model.path=policy", "rollout.sampling.max_new_tokens=8", f"total_steps={steps}", "run_dir=run"]
    with in_process(folder):
        config = load_config("train", ["experiment=text", *own, *overrides]).config
        assert asyncio.run(training._train(config, prepare_run_dir(config))) == 0
    return folder / "run"


def evaluations(run_dir: Path) -> list[dict[str, float]]:
    return [record.metrics for record in read_metrics(run_dir) if "eval/accuracy" in record.metrics]


@pytest.mark.some(1)
@pytest.mark.parametrize("num_rows", [1, 6, pytest.param(20, marks=pytest.mark.full)])
def test_a_set_of_few_rows_is_trained_with_untouched_defaults(tmp_path: Path, num_rows: int) -> None:
    summary = read_summary(train(tmp_path, num_rows))
    assert summary["status"] == "completed"
    assert summary["trained_groups"] == 8, "rows recur within a batch"


@pytest.mark.full
def test_a_run_without_evaluations_says_so_and_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ("evaluation.num_tasks=0", "checkpoint.every_steps=1")
    run_dir = train(tmp_path, 6, *typed)
    assert "none: the run has no evaluations (evaluation.num_tasks=0)" in capsys.readouterr().out
    assert evaluations(run_dir) == []
    summary = read_summary(run_dir)
    assert [summary[key] for key in ("evaluated_on", "eval_before", "eval_after")] == [None, None, None]
    assert "evaluation.num_tasks=0" in write_report(run_dir).read_text()
    results, _ = compare([read_run(run_dir)])
    assert dict(row for row in results)["evaluated on"] == "nothing"
    with in_process(tmp_path):
        assert resume.resume(run_dir, ["total_steps=3"]) == 0
    assert read_summary(run_dir)["steps"] == 3
    assert evaluations(run_dir) == []


@pytest.mark.full
def test_a_run_that_is_evaluated_on_its_training_rows_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train(tmp_path, 6, "env.args.held_out=train", "evaluation.every_steps=1")
    told = capsys.readouterr().out
    assert "on 6 training tasks" in told
    assert "held-out" not in told
    assert [one["eval/tasks_trained_on"] for one in evaluations(run_dir)] == [6, 6, 6]
    assert read_summary(run_dir)["evaluated_on"] == "training"
    page = write_report(run_dir).read_text()
    assert "Training accuracy" in page
    assert "Held-out accuracy" not in page
    (run_dir / "summary.json").unlink()  # as while it goes on
    assert read_run(run_dir).evaluated_on == "training"
    results, _ = compare([read_run(run_dir)])
    assert dict(row for row in results)["evaluated on"] == "training tasks"


@pytest.mark.full
def test_sets_of_training_rows_and_of_others_are_evaluated_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"prompt": "10+10=", "answer": "20"}\n')
    run_dir = train(tmp_path, 5, "env.args.held_out={seen: train, new: other.jsonl}", steps=1)
    first = evaluations(run_dir)[0]
    assert [first[f"eval/tasks/{name}"] for name in ("seen", "new")] == [5, 1]
    assert read_summary(run_dir)["evaluated_on"] == "held-out and training"


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp"])
def test_groups_of_one_are_trained(tmp_path: Path, algorithm: str) -> None:
    run_dir = train(tmp_path, 6, f"algorithm={algorithm}", "dataflow.group_size=1", "evaluation.num_tasks=0")
    norms = [record.metrics["loss/grad_norm"] for record in read_metrics(run_dir) if "reward/mean" in record.metrics]
    assert len(norms) == 2
    assert all(norm > 0 for norm in norms), "something is learned"
