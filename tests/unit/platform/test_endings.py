"""The policy is saved however a run ends, and a failed evaluation affects only its own metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.dataflow.errors import TrainingError
from penstock.platform.run import controller
from penstock.platform.run.evaluation import Evaluation
from tests.runs import STEPS, Evaluator, run_of


async def test_the_policy_is_saved_before_the_last_evaluation_which_may_fail(tmp_path: Path) -> None:
    class LooksAtTheDisk(Evaluator):
        async def evaluate(self, step: int, tasks: object) -> Evaluation:
            assert step < STEPS or ("policy", STEPS) in run.trainer.saved
            return await super().evaluate(step, tasks)

    notes: list[str] = []
    run = run_of(set(), tmp_path, notes, evaluator=LooksAtTheDisk(fails_at={STEPS}))
    await controller.train(run)
    assert run.policy_version == STEPS
    assert [one.step for one in run.evaluations] == [0], "the figure is missing, not replaced by another one"
    assert [note for note in notes if "the judge is down" in note and f"v{STEPS}" in note]


async def test_failed_evaluations_before_and_during_training_are_reported_and_counted(tmp_path: Path) -> None:
    evaluator = Evaluator(fails_at={0, 2})
    run, logged = run_of(set(), tmp_path, [], every_steps=1, evaluator=evaluator), []
    log = run._instruments.hub.log
    run._instruments.hub.log = lambda step, metrics: (logged.append((step, metrics)), log(step, metrics))
    await controller.train(run)
    assert run.version == STEPS
    assert [one.step for one in run.evaluations] == [1, 3, STEPS]
    assert [(step, found["eval/failed"]) for step, found in logged if "eval/failed" in found] == [(0, 1.0), (2, 2.0)]


async def test_an_evaluation_that_fails_after_later_steps_is_counted_at_the_present_step(tmp_path: Path) -> None:
    class FailsLate(Evaluator):
        async def evaluate(self, step: int, tasks: object) -> Evaluation:
            while step == 1 and run.version < STEPS:  # noqa: ASYNC110 - the run has no event for it
                await asyncio.sleep(0)
            return await super().evaluate(step, tasks)

    run, logged = run_of(set(), tmp_path, [], every_steps=1, evaluator=FailsLate(fails_at={1})), []
    log = run._instruments.hub.log
    run._instruments.hub.log = lambda step, metrics: (logged.append((step, metrics)), log(step, metrics))
    await controller.train(run)
    assert [step for step, found in logged if "eval/failed" in found] == [STEPS]


async def test_a_skipped_step_repeats_neither_the_checkpoint_nor_the_evaluation_of_its_version(tmp_path: Path) -> None:
    evaluator = Evaluator()
    run = run_of({0, 2, 3, 5}, tmp_path, [], every_steps=1, evaluator=evaluator)
    await controller.train(run)
    assert run.trainer.snapshots == [1, 2, 3, STEPS], "each version once"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_3", f"step_{STEPS}"]
    assert run.trainer.saved == [("policy", STEPS)]
    assert evaluator.evaluated == [0, 1, 2, 3, STEPS], "each version once"


async def test_a_policy_that_cannot_be_saved_at_the_end_is_reported_and_hides_no_cause(tmp_path: Path) -> None:
    notes: list[str] = []
    run = run_of(set(), tmp_path, notes)
    run.version = 2
    run.trainer.fails_to_save = TrainingError("trainer: save_hf: a process died: rank 0")
    await run.save_policy_at_end()
    assert run.policy_version is None
    assert "could not be saved: trainer: save_hf: a process died: rank 0" in notes[-1]


async def test_nothing_is_saved_of_a_run_that_has_trained_nothing(tmp_path: Path) -> None:
    run = run_of(set(), tmp_path, [])
    await run.save_policy_at_end()
    assert run.trainer.saved == []
