"""With `evaluation.keep_best`, the checkpoint of the best evaluation outlives newer ones and can be exported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.platform.config.schema import CheckpointConfig, EvaluationConfig
from penstock.platform.run import controller
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.evaluation import Evaluation
from penstock.platform.run.run import Run
from tests.runs import STEPS, Evaluator, run_of


class Graded(Evaluator):
    """Gives each version its accuracy."""

    def __init__(self, *accuracies: float) -> None:
        super().__init__()
        self.accuracies = accuracies

    async def evaluate(self, step: int, tasks: object, name: str = "") -> Evaluation:
        await super().evaluate(step, tasks)
        return Evaluation(self.accuracies[step], 0.5, 1, step=step, version_min=step, version_max=step)


def keeping_run(
    run_dir: Path, notes: list[str], evaluator: Evaluator, every: int = 0, *, keep_best: bool = True
) -> Run:
    """A run that evaluates every step, keeps one checkpoint, and takes others every so many steps."""
    run = run_of(set(), run_dir, notes, evaluator=evaluator)
    evaluation = EvaluationConfig(every_steps=1, keep_best=keep_best)
    run.config = run.config.model_copy(update={"evaluation": evaluation})
    run.evaluations.config = evaluation
    run.checkpointer.config = CheckpointConfig(every_minutes=0, every_steps=every, keep=1)
    return run


def best(run_dir: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((run_dir / "best.json").read_text())
    return found


async def test_the_best_and_the_newest_checkpoint_are_kept(tmp_path: Path) -> None:
    notes: list[str] = []
    run = keeping_run(tmp_path, notes, Graded(1.0, 0.2, 0.9, 0.5, 0.4))
    await controller.train(run)
    assert CheckpointFolder(tmp_path).versions() == [2, STEPS]
    assert best(tmp_path) == {"step": 2, "accuracy": 0.9, "reward_mean": 0.5}, "not the policy before training"
    assert [
        note.startswith(("eval at v1:", "eval at v2:")) for note in notes if note.endswith("; the best so far")
    ] == [
        True,
        True,
    ]


async def test_of_several_best_ones_the_first_of_equals_is_kept(tmp_path: Path) -> None:
    run = keeping_run(tmp_path, [], Graded(1.0, 0.5, 0.9, 0.5, 0.4))
    checkpoint = CheckpointConfig(every_minutes=0, keep=1, keep_best=2)
    run.config = run.config.model_copy(update={"checkpoint": checkpoint})
    run.checkpointer.config = checkpoint
    await controller.train(run)
    assert CheckpointFolder(tmp_path).versions() == [1, 2, STEPS]


async def test_the_last_policy_may_be_the_best_although_checkpoints_are_off(tmp_path: Path) -> None:
    await controller.train(keeping_run(tmp_path, [], Graded(0.1, 0.2, 0.3, 0.3, 0.4)))
    assert CheckpointFolder(tmp_path).versions() == [2, STEPS], "step 2 was the best when that of the last was written"
    assert best(tmp_path)["step"] == STEPS


async def test_the_checkpoint_of_an_evaluation_that_goes_on_is_kept_until_it_is_known(tmp_path: Path) -> None:
    class Slow(Graded):
        async def evaluate(self, step: int, tasks: object, name: str = "") -> Evaluation:
            while step == 1 and run.version < STEPS:  # noqa: ASYNC110 - the run has no event for it
                await asyncio.sleep(0)
            return await super().evaluate(step, tasks)

    run = keeping_run(tmp_path, [], Slow(0.1, 0.9, 0.0, 0.0, 0.4), every=1)
    await controller.train(run)
    assert CheckpointFolder(tmp_path).versions() == [1, STEPS]
    assert best(tmp_path)["step"] == 1


async def test_an_evaluation_that_went_on_at_a_checkpoint_is_missed_and_its_policy_is_kept(tmp_path: Path) -> None:
    run = keeping_run(tmp_path, [], Graded())
    run.evaluations.running = 1
    for version, told in ((1, 0), (2, 1)):
        notes: list[str] = []
        again = keeping_run(tmp_path, notes, Graded())
        again.load_state_dict(version, run.state_dict())
        assert sum("the evaluation at v1 was cut off" in note and "--step 1" in note for note in notes) == told
        assert again.evaluations.spared_versions(1) == ({1} if told else frozenset()), "that of its version is repeated"


async def test_a_run_that_does_not_keep_the_best_takes_no_further_checkpoints(tmp_path: Path) -> None:
    await controller.train(keeping_run(tmp_path, [], Graded(0.1, 0.2, 0.9, 0.3, 0.4), keep_best=False))
    assert CheckpointFolder(tmp_path).versions() == []
    assert not (tmp_path / "best.json").exists()


async def test_the_best_evaluation_is_that_of_the_checkpoint_from_which_a_run_continues(tmp_path: Path) -> None:
    run = keeping_run(tmp_path, [], Graded(0.1, 0.2, 0.3, 0.9, 0.4))
    await controller.train(run)
    assert best(tmp_path)["step"] == 3
    again = keeping_run(tmp_path, [], Graded())
    state = run.state_dict()
    state["evaluations"] = [one for one in state["evaluations"] if one["step"] <= 2]
    again.load_state_dict(2, state)
    assert best(tmp_path)["step"] == 2
    assert again.evaluations.spared_versions(1) == {2}
    assert again.evaluations.spared_versions(2) == {1, 2}
    assert again.evaluations.spared_versions(9) == {1, 2}


async def test_a_full_disk_is_noted_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "best.json").mkdir()
    notes: list[str] = []
    run = keeping_run(tmp_path, notes, Graded(0.1, 0.2, 0.3, 0.9, 0.4))
    await controller.train(run)
    assert run.version == STEPS
    assert len(run.evaluations.done) == STEPS + 1
    assert any("best.json could not be written" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "num_held_out", "expected"),
    [
        ({}, 1024, 256),
        ({}, 9, 9),
        ({"num_tasks_during_training": 16}, 1024, 16),
        ({"keep_best": True}, 1024, 1024),
    ],
)
def test_an_evaluation_during_training_has_the_first_tasks(
    settings: dict[str, Any], num_held_out: int, expected: int
) -> None:
    assert EvaluationConfig(**settings).first_tasks(num_held_out) == expected


def test_spared_checkpoints_of_a_lineage_that_was_left_are_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.prepare()
    for version in (1, 2, 3, 4):
        (folder.folder / f"step_{version}").mkdir()
    folder.prune(1, newest=3, spared={1, 4})
    assert folder.versions() == [1, 3]
