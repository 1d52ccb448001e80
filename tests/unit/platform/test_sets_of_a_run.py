"""Sets of `evaluation.sets`: own tasks, schedule and sampling; what is not set is as in `evaluation`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.streams import stream_factories
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.platform.checks.load import compose_config
from penstock.platform.cli.main import app
from penstock.platform.config.schema import EvaluationConfig
from penstock.platform.run.evaluation import Evaluation, load_sets
from penstock.platform.run.evaluations import Evaluations


class Evaluator:
    """Notes what it evaluates: version, set and number of tasks."""

    num_answered = num_wanted = 0

    def __init__(self, fails_on: str | None = None) -> None:
        self.calls: list[tuple[int, str, int]] = []
        self.fails_on = fails_on

    async def evaluate(self, step: int, tasks: list[Task], name: str = "") -> Evaluation:
        self.calls.append((step, name, len(tasks)))
        await asyncio.sleep(0)
        if name == self.fails_on:
            raise PenstockError("the judge is down")
        return Evaluation(0.25 if name else 0.75, 0.5, len(tasks), step=step, version_min=step, version_max=step)


def some(number: int) -> list[Task]:
    return [Task(TaskId(f"t/{index}"), str(index)) for index in range(number)]


class Parts:
    """The evaluations of a run, with what they have logged and told."""

    def __init__(self, run_dir: Path, fails_on: str | None = None, **settings: Any) -> None:
        self.evaluator = Evaluator(fails_on)
        self.logged: list[Mapping[str, float]] = []
        self.notes: list[str] = []
        config = EvaluationConfig(every_steps=2, **settings)
        sets = {name: some(300) for name in config.sets}
        self.evaluations = Evaluations(
            config,
            self.evaluator,
            some(10),
            run_dir,
            self.logged.append,
            self.notes.append,
            None,
            sets,  # type: ignore[arg-type]
        )

    async def run(self, last: int) -> None:
        async def delivered() -> None:
            pass

        await self.evaluations.first(0)
        for version in range(1, last):
            self.evaluations.start(version)
            await asyncio.gather(*self.evaluations._started.values())
        await self.evaluations.last(last, delivered)


async def test_each_set_is_evaluated_by_its_own_schedule_and_the_others_are_not(tmp_path: Path) -> None:
    hard = {"every_steps": 3, "before_training": False, "num_tasks_during_training": 5}
    parts = Parts(tmp_path, sets={"hard": hard, "usual": {}})
    await parts.run(7)
    assert parts.evaluator.calls == [
        (0, "", 10), (0, "usual", 300),
        (2, "", 10), (2, "usual", 256),
        (3, "hard", 5),
        (4, "", 10), (4, "usual", 256),
        (6, "", 10), (6, "hard", 5), (6, "usual", 256),
        (7, "", 10), (7, "hard", 300), (7, "usual", 300),
    ]  # fmt: skip
    assert [one.step for one in parts.evaluations.done] == [0, 2, 4, 6, 7], "those of sets do not decide what is best"
    assert {one.accuracy for one in parts.evaluations.done} == {0.75}
    assert [record["eval/accuracy/hard"] for record in parts.logged if "eval/accuracy/hard" in record] == [0.25] * 3
    assert "eval of hard at v3: accuracy 0.250, mean reward 0.500 on 5 held-out tasks" in parts.notes


async def test_without_sets_and_before_training_nothing_is_evaluated_at_first(tmp_path: Path) -> None:
    parts = Parts(tmp_path, before_training=False)
    await parts.run(3)
    assert parts.evaluator.calls == [(2, "", 10), (3, "", 10)]


async def test_a_set_that_fails_is_noted_and_the_others_are_measured(tmp_path: Path) -> None:
    parts = Parts(tmp_path, fails_on="hard", sets={"hard": {}})
    await parts.run(1)
    assert (parts.evaluations.num_failed, len(parts.evaluations.done)) == (2, 2)
    assert parts.notes[1] == "evaluation of hard at v0 failed; the run continues: the judge is down"


async def test_only_the_tasks_of_the_run_spare_a_checkpoint(tmp_path: Path) -> None:
    parts = Parts(tmp_path, sets={"hard": {"every_steps": 3}})
    parts.evaluations.start(3)
    assert parts.evaluations.running is None
    parts.evaluations.start(4)
    assert parts.evaluations.running == 4
    parts.evaluations.start(6)
    assert parts.notes == [
        "evaluation at v6 skipped: the previous one is still running",
        "evaluation of hard at v6 skipped: the previous one is still running",
    ], "each waits for its own"
    await parts.evaluations.close()


def test_what_a_set_does_not_say_is_as_in_evaluation() -> None:
    config = EvaluationConfig(
        answers_per_task=4,
        temperature=0.5,
        part="right",
        sets={"hard": {"temperature": 1.0}},  # type: ignore[dict-item]
    )
    view = config.of_set("hard")
    assert (view.temperature, view.answers_per_task, view.part, view.every_steps) == (1.0, 4, "right", 20)
    assert config.of_set("") is config


def test_a_set_with_a_source_of_its_own_has_other_tasks_and_its_environment_is_known() -> None:
    own = ["evaluation.sets.long.env.args.digits=4", "evaluation.sets.long.num_tasks=3", "evaluation.num_tasks=5"]
    config = compose_config(["experiment=arithmetic", *own, "evaluation.sets.again.temperature=1.0"])
    found = load_sets(config)
    assert {name: len(tasks) for name, tasks in found.items()} == {"long": 3, "again": 5}
    assert {len(str(task.prompt)) for task in found["long"]} == {len("1234+5678=")}
    assert stream_factories(config.played_env)["evaluation/long"].args["digits"] == 4
    assert compose_config(["experiment=arithmetic"]).played_env.streams == {}


def dry_run(*words: str, command: str = "train") -> tuple[int, str]:
    result = CliRunner().invoke(app, [command, "experiment=arithmetic", *words, "--dry-run"], env={"COLUMNS": "400"})
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def test_the_dry_run_plans_every_set() -> None:
    sets = [
        *("evaluation.sets.long.env.args.digits=4", "evaluation.sets.long.num_tasks=64"),
        *("evaluation.sets.long.before_training=false", "evaluation.sets.sampled.answers_per_task=8"),
    ]
    code, output = dry_run(*sets, "evaluation.num_tasks=300")
    assert code == 0, output
    assert (
        "evaluation: 300 tasks, 1 answer each at temperature 0; before training, every 10 steps (256 of them), "
        in output
    )
    assert "evaluation.sets.long: 64 tasks, 1 answer each at temperature 0; every 10 steps, after training" in output
    assert "evaluation.sets.sampled: 300 tasks, 8 answers each at temperature 1; before training" in output
    assert "evaluation.sets.sampled.temperature=1.0, not the default null" in output, "greedy answers are all the same"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluation.sets.partner.temperature=1.0"], "'partner' is no name of an evaluation set"),
        (["evaluation.sets.a.env.factory=nowhere:at_all"], "evaluation.sets.a: .*no module 'nowhere'"),
        (["evaluation.sets.a.env.args.digits=9"], "evaluation.sets.a: env.args=.*digits=9 is outside 1..6"),
        (["evaluation.sets.a.env.args.digit=3"], "evaluation.sets.a: .*Did you mean 'digits'"),
        (["evaluation.sets.a.every_step=3"], "every_step.*Did you mean.*every_steps"),
        (
            ["evaluation.sets.a.env.args={digits: 1, operators: '-'}", "evaluation.sets.a.num_tasks=1000"],
            r"evaluation\.sets\.a\.num_tasks=1000: there are only \d+ held-out tasks",
        ),
        (["evaluation.num_tasks=0", "evaluation.sets.a.temperature=1.0"], "is a run without evaluations"),
        (
            [
                "evaluation.sets.a.num_tasks=3",
                "evaluation.sets.a.num_tasks_during_training=4",
                "+evaluation.sets.a.env={}",
            ],
            "num_tasks_during_training=4 is above its num_tasks=3",
        ),
        (
            ["evaluation.sets.a.answers_per_task=4", "evaluation.sets.a.temperature=0"],
            r"sets\.a\.answers_per_task=4 with evaluation\.sets\.a\.temperature=0: greedy answers",
        ),
    ],
)
def test_a_set_that_cannot_work_is_refused_with_its_key(words: list[str], message: str) -> None:
    code, output = dry_run(*words)
    assert code == 2, output
    assert re.search(message, output), output


def test_a_set_that_measures_the_same_twice_is_said() -> None:
    code, output = dry_run("evaluation.sets.a.num_tasks=8")
    assert code == 0, output
    assert "evaluation.sets.a has the tasks and the sampling of `evaluation` itself" in output


async def test_the_environment_of_a_set_plays_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    words = ["evaluation.sets.game.env.factory=guessing:GuessingGame", "evaluation.sets.game.num_tasks=1"]
    config = compose_config(["experiment=arithmetic", *words])
    (task,) = load_sets(config)["game"]
    host = EpisodeHost(config.played_env, config.seed)
    try:
        async with host.open(task) as played:
            assert (await played.reset())["content"] == "?1-30"
    finally:
        await host.close()
