"""With `evaluation.patience`, a run ends once its evaluations are no longer better."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ledger import GroupState
from penstock.platform.checks.load import compose_config
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.schema import CheckpointConfig, EvaluationConfig
from penstock.platform.metrics.run_files import BEST_FILE, CONFIG_FILE, SUMMARY_FILE
from penstock.platform.run import controller, resume
from penstock.platform.run.checkpoint import choose_checkpoint
from penstock.platform.run.evaluation import Evaluation, comparable_evaluations
from penstock.platform.run.lifecycle import EXIT_OK
from penstock.platform.run.resume import nothing_left
from penstock.platform.run.run import Run
from tests.runs import GROUPS, STEPS, Evaluator, run_of


class Graded(Evaluator):
    """Gives each version its accuracy."""

    def __init__(self, *accuracies: float) -> None:
        super().__init__()
        self.accuracies = accuracies

    async def evaluate(self, step: int, tasks: object, name: str = "") -> Evaluation:
        await super().evaluate(step, tasks)
        return Evaluation(self.accuracies[step], 0.5, 1, step=step, version_min=step, version_max=step)


def run_with(
    patience: int | None, run_dir: Path, evaluator: Evaluator, notes: list[str] | None = None, *, keep_best: bool = True
) -> Run:
    """A run of `STEPS` steps that evaluates after each and takes checkpoints of the best and the last."""
    run = run_of(set(), run_dir, [] if notes is None else notes, evaluator=evaluator)
    evaluation = EvaluationConfig(every_steps=1, keep_best=keep_best, patience=patience)
    run.config = run.config.model_copy(update={"evaluation": evaluation})
    run.evaluations.config = evaluation
    run.checkpointer.config = CheckpointConfig(every_minutes=0, every_steps=1, keep=1)
    return run


FALLING = (0.9, 0.5, 0.4, 0.3, 0.2)


async def test_it_ends_at_the_first_cut_after_so_many_evaluations_that_are_not_better(tmp_path: Path) -> None:
    """That of v1 is the best, that of v2 is known at the cut of v3: it goes on beside the third step."""
    notes: list[str] = []
    run = run_with(1, tmp_path, Graded(*FALLING), notes)
    await controller.train(run)
    assert run.version == run.total_steps == 3 < STEPS
    assert [one.step for one in run.evaluations.done] == [0, 1, 2, 3], "the last policy is evaluated"
    (note,) = [note for note in notes if "evaluation.patience" in note]
    assert "the training ends at v3: v1 is still the best (accuracy 0.500, mean reward 0.500) after 1 more eval" in note
    assert f"`penstock export {tmp_path} --best` writes its policy" in note


@pytest.mark.parametrize(("before", "is_told"), [(0.9, True), (0.5, False)])
async def test_a_policy_that_was_better_before_training_is_told(tmp_path: Path, before: float, is_told: bool) -> None:
    notes: list[str] = []
    await controller.train(run_with(1, tmp_path, Graded(before, *FALLING[1:]), notes))
    (note,) = [note for note in notes if "evaluation.patience" in note]
    assert ("Before training it was better still (accuracy 0.900, mean reward 0.500)" in note) is is_told


async def test_the_last_policy_is_saved_and_the_books_are_closed_as_at_every_end(tmp_path: Path) -> None:
    run = run_with(1, tmp_path, Graded(*FALLING))
    await controller.train(run)
    assert run.policy_version == 3
    counts = run.ledger.counts()
    assert (counts.trained, counts.live) == (3 * GROUPS, 0)
    assert {state for state, _ in run.ledger.reasons} <= {GroupState.DROPPED}


async def test_the_checkpoints_of_the_best_and_of_the_end_are_kept(tmp_path: Path) -> None:
    run = run_with(1, tmp_path, Graded(*FALLING))
    await controller.train(run)
    assert choose_checkpoint(tmp_path).version == 3
    assert choose_checkpoint(tmp_path, 1).version == 1


async def test_without_patience_or_with_a_better_evaluation_it_trains_to_the_end(tmp_path: Path) -> None:
    for patience, accuracies in ((None, FALLING), (1, (0.1, 0.2, 0.3, 0.4, 0.5)), (3, FALLING)):
        run = run_with(patience, tmp_path / f"{patience}{accuracies[0]}", Graded(*accuracies))
        await controller.train(run)
        assert run.version == STEPS


async def test_it_is_told_that_the_best_policy_is_not_kept(tmp_path: Path) -> None:
    notes: list[str] = []
    await controller.train(run_with(1, tmp_path, Graded(*FALLING), notes, keep_best=False))
    assert any("The policy of v1 is not kept, since evaluation.keep_best=false" in note for note in notes)


@pytest.mark.parametrize(("patience", "ends"), [(1, True), (5, False), (None, False)])
async def test_what_continues_it_ends_at_once_or_trains_on_with_more_patience(
    tmp_path: Path, patience: int | None, ends: bool
) -> None:
    run = run_with(1, tmp_path, Graded(*FALLING))
    await controller.train(run)
    checkpoint = choose_checkpoint(tmp_path)
    again = run_with(patience, tmp_path, Graded(*FALLING))
    again.load_state_dict(3, checkpoint.manifest["run"])
    assert (nothing_left(again.config, checkpoint, "") is not None) is ends
    await again.evaluate_first()
    assert again.total_steps == (3 if ends else STEPS)


async def test_evaluations_of_something_else_neither_end_the_run_that_continues_nor_are_its_best(
    tmp_path: Path,
) -> None:
    await controller.train(run_with(1, tmp_path, Graded(*FALLING)))
    checkpoint, notes = choose_checkpoint(tmp_path), []
    (tmp_path / CONFIG_FILE).touch()
    again = run_with(1, tmp_path, Graded(*FALLING), notes)
    evaluation = again.config.evaluation.model_copy(update={"answers_per_task": 4})
    again.config = again.config.model_copy(update={"evaluation": evaluation})
    again.load_state_dict(3, checkpoint.manifest["run"])
    assert nothing_left(again.config, checkpoint, "") is None
    assert again.evaluations.done == []
    assert not (tmp_path / BEST_FILE).exists()
    (note,) = notes
    assert note.startswith(
        "evaluation.answers_per_task was 1 and is 4: evaluations before that measured something else"
    )


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.sampling.stop=[END]", "rollout.sampling.stop was [] and is ['END']"),
        ("rollout.sampling.top_k=20", "rollout.sampling.top_k was 0 and is 20"),
        ("dataflow.pass_reward=0.5", "dataflow.pass_reward was 1.0 and is 0.5"),
        ("rollout.sampling.temperature=0.5", None),  # evaluations have their own
    ],
)
def test_evaluations_with_other_answers_or_passes_cannot_be_compared(override: str, reason: str | None) -> None:
    before, after = (compose_config(["experiment=arithmetic", *words]) for words in ([], [override]))
    saved = {"config": before.model_dump(mode="json"), "evaluations": [{"step": 1}]}
    done, why_none = comparable_evaluations(saved, after)
    assert len(done) == (reason is None)
    assert reason is None or str(why_none).startswith(f"{reason}: evaluations before that measured something else")


def test_resume_refuses_a_run_that_has_ended_and_names_the_key_and_auto_has_nothing_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose_config(["experiment=arithmetic", f"run_dir={tmp_path}", "resume=auto", "evaluation.patience=1"])
    run = run_with(1, tmp_path, Graded(*FALLING))
    run.config = config.model_copy(update={"total_steps": STEPS})
    asyncio.run(controller.train(run))
    (tmp_path / CONFIG_FILE).write_text(to_yaml(config))
    assert resume.train(config) == EXIT_OK
    assert "evaluation.patience=1: the run had ended by step 3" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"evaluation\.patience=1: the run had ended by step 3") as refused:
        resume.resume(tmp_path, [])
    assert f"penstock resume {tmp_path} evaluation.patience=null" in str(refused.value)


def test_resume_refuses_fewer_steps_than_an_interrupted_run_has_made(tmp_path: Path) -> None:
    asyncio.run(controller.train(run_with(None, tmp_path, Graded(*FALLING))))
    config = compose_config(["experiment=arithmetic", f"run_dir={tmp_path}", f"total_steps={STEPS}"])
    (tmp_path / CONFIG_FILE).write_text(to_yaml(config))
    (tmp_path / SUMMARY_FILE).write_text('{"status": "interrupted"}')
    with pytest.raises(ConfigError, match=rf"total_steps={STEPS - 1}: the checkpoint is of step {STEPS}, so nothing"):
        resume.resume(tmp_path, [f"total_steps={STEPS - 1}"])


def test_the_last_step_of_the_rlhf_chain_evaluates_the_true_reward() -> None:
    config = compose_config(["experiment=arithmetic_rlhf_online_dpo"])
    assert config.evaluation.part == "true"
    assert config.reward.parts["true"].weight == 0.0
