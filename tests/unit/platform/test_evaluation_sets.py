"""Several evaluation sets are reported by their names; own rows that cannot work are refused in the dry run."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.dataflow.ids import TaskId
from penstock.dataflow.ports import Score
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.cli.main import app
from penstock.platform.config.schema import EvaluationConfig
from penstock.platform.metrics.hub import undeclared
from penstock.platform.run.evaluation import Evaluation, Evaluator, SetScore, evaluation_from
from tests.answers import answered
from tests.runs import run_of


class Runner:
    codec = SimpleNamespace(stop_token_ids=(1,))
    pool = SimpleNamespace(in_use=nullcontext)

    async def run(self, context: Any, index: int, sampling: SamplingParams) -> Trajectory:
        del index, sampling
        return answered(context.task.prompt)


class Rewards:
    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        del trajectory
        return Score(float(task.prompt), {})


async def evaluated(*tasks: tuple[str, str]) -> Evaluation:
    numbered = enumerate(tasks)
    given = [Task(TaskId(f"t{index}"), reward, evaluation_set=name) for index, (name, reward) in numbered]
    evaluator = Evaluator(Runner(), Rewards(), SamplingParams(8), EvaluationConfig(), 1.0)  # type: ignore[arg-type]
    return await evaluator.evaluate(3, given)


async def test_each_set_has_its_own_figures_and_all_of_them_together_too() -> None:
    found = await evaluated(("easy", "1"), ("hard", "0"), ("easy", "1"), ("hard", "0.5"), ("easy", "0"))
    assert (found.accuracy, found.reward_mean, found.num_tasks) == (0.4, 0.5, 5)
    assert found.sets == {"easy": SetScore(2 / 3, 2 / 3, 3), "hard": SetScore(0.0, 0.25, 2)}
    metrics = found.metrics()
    assert metrics["eval/accuracy/easy"] == 2 / 3
    assert metrics["eval/reward_mean/hard"] == 0.25
    assert metrics["eval/tasks/hard"] == 2
    assert undeclared(metrics) == []
    saved = json.loads(json.dumps(asdict(found)))
    assert evaluation_from(saved) == found


async def test_one_set_without_a_name_has_the_figures_of_the_evaluation_only() -> None:
    found = await evaluated(("", "1"), ("", "0"))
    assert (found.accuracy, found.sets) == (0.5, {})
    assert not any(name.startswith("eval/accuracy/") for name in found.metrics())


async def test_the_console_names_every_set(tmp_path: Path) -> None:
    found = await evaluated(("easy", "1"), ("hard", "0"))

    class Given:
        async def evaluate(self, step: int, tasks: object, name: str = "") -> Evaluation:
            del step, tasks
            return found

    notes: list[str] = []
    await run_of(set(), tmp_path, notes, evaluator=Given()).evaluate_first()  # type: ignore[arg-type]
    assert notes[-1].endswith(
        ": accuracy 0.500, mean reward 0.500 on 2 held-out tasks; easy: accuracy 1.000, mean reward 1.000 on 1; "
        "hard: accuracy 0.000, mean reward 0.000 on 1"
    )


async def test_the_console_says_how_many_answers_are_left_out_and_why(tmp_path: Path) -> None:
    class Given:
        async def evaluate(self, step: int, tasks: object, name: str = "") -> Evaluation:
            del tasks
            why = {"reward: the judge is down": 2, "env: a tool hung": 1}
            return Evaluation(0.0, 0.25, 5, step=step, version_min=0, version_max=0, num_unscorable=3, failures=why)

    notes: list[str] = []
    await run_of(set(), tmp_path, notes, evaluator=Given()).evaluate_first()  # type: ignore[arg-type]
    assert notes == [
        "eval at v0: mean reward 0.250, none solved on 5 held-out tasks",
        "eval at v0: 3 answers could not be sampled or scored and are left out (2 × reward: the judge is down, 1 × "
        "env: a tool hung)",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["path=rowz.jsonl"], "env.args.path=rowz.jsonl: no such file"),
        (["path=rows.jsonl", "split=test"], "split=test was asked for, but files have no splits"),
        (["path=rows.jsonl", "held_out=own.csv"], "own.csv, line 3 has 1 values"),
        (["path=empty.jsonl"], "empty.jsonl is empty"),
        (["path=folder"], "folder is a folder without rows"),
        (["path=rows.jsonl", "prompt_field=promt"], "line 1 has no column 'promt'; .* Did you mean 'prompt'"),
        (["path=rows.jsonl", "heldout=0.1"], "unexpected keyword argument 'heldout'.* Did you mean 'held_out'"),
        (["rows=my_source:rows"], "No such file or directory: 'gone.jsonl'"),
    ],
)
def test_rows_that_cannot_work_end_the_dry_run_as_they_end_the_run(
    overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": ""}) + "\n" for n in range(200)))
    Path("own.csv").write_text("prompt,answer\n1,2\n3\n")
    Path("empty.jsonl").touch()
    Path("folder").mkdir()
    Path("my_source.py").write_text("def rows():\n    return open('gone.jsonl')\n")
    words = [
        "experiment=arithmetic",
        "env=dataset",
        "evaluation.num_tasks=5",
        *(f"env.args.{one}" for one in overrides),
    ]
    result = CliRunner().invoke(app, ["train", *words, "--dry-run"], env={"COLUMNS": "400"})
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output

    assert re.search(message, result.output), result.output


def test_a_dataset_that_is_not_downloaded_is_a_warning_of_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["experiment=arithmetic", "env=dataset", "env.args.path=org/not-here", "evaluation.num_tasks=5"]
    result = CliRunner().invoke(app, ["train", *words, "--dry-run"], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert "split 'train' of org/not-here is not in the local cache" in result.output
