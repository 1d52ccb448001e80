"""Greedy evaluation on held-out tasks. It uses the engines of the rollouts and is not recorded in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ports import RewardWorker, SamplingParams
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.platform.run.lifecycle import first_error
from penstock.rollout.trajectory.group_task import RolloutContext
from penstock.rollout.trajectory.runner import RolloutRunner, TrajectoryRunner

MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class SetScore:
    """Result on one of several evaluation sets."""

    accuracy: float
    reward_mean: float
    num_tasks: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        accuracy: Share of tasks whose reward is at least 1, over all evaluation sets.
        version_min: Oldest policy version that sampled a token of the evaluation.
        version_max: Newest such version; equal to `version_min` if no weights were published during the evaluation.
        partner: Evaluation of the partner policy on the same tasks; None in runs of one policy.
        sets: Name of the evaluation set -> its result; empty if there is only one set.
    """

    step: int
    accuracy: float
    reward_mean: float
    version_min: int
    version_max: int
    num_tasks: int
    partner: Evaluation | None = None
    sets: Mapping[str, SetScore] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward_mean": self.reward_mean,
            "eval/version_min": self.version_min,
            "eval/version_max": self.version_max,
            "eval/tasks": self.num_tasks,
            **({} if self.partner is None else {"eval/partner_accuracy": self.partner.accuracy}),
            **{f"eval/accuracy/{name}": score.accuracy for name, score in self.sets.items()},
            **{f"eval/reward_mean/{name}": score.reward_mean for name, score in self.sets.items()},
            **{f"eval/tasks/{name}": score.num_tasks for name, score in self.sets.items()},
        }


def evaluation_from(saved: Mapping[str, Any]) -> Evaluation:
    """The evaluation that a checkpoint keeps as a dict."""
    partner = saved["partner"]
    sets = {name: SetScore(**score) for name, score in saved.get("sets", {}).items()}
    return Evaluation(**{**saved, "partner": None if partner is None else evaluation_from(partner), "sets": sets})


async def sample_and_score(
    runner: RolloutRunner, rewards: RewardWorker, context: RolloutContext, index: int, sampling: SamplingParams
) -> Trajectory:
    """Sample and score trajectory `index` of a task, without recording it in the ledger.

    Raises:
        TrajectoryError: The error of the last attempt, if all `MAX_ATTEMPTS` attempts failed.
    """
    failure: TrajectoryError | None = None
    for _ in range(MAX_ATTEMPTS):
        try:
            trajectory = await runner.run(context, index, sampling)
            score = await rewards.score(context.task, trajectory)
        except TrajectoryError as error:
            failure = error
        else:
            trajectory.score(score.reward, score.parts)
            return trajectory
    assert failure is not None, "MAX_ATTEMPTS is at least 1"
    raise failure


class SupportsEvaluation(Protocol):
    async def evaluate(self, step: int, tasks: Sequence[Task]) -> Evaluation: ...


class Evaluator:
    """Samples held-out tasks greedily and scores the answers."""

    def __init__(self, runner: TrajectoryRunner, rewards: RewardWorker, max_new_tokens: int) -> None:
        self._runner = runner
        self._rewards = rewards
        self._greedy = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=0.0, stop_token_ids=runner.codec.stop_token_ids
        )

    async def evaluate(self, step: int, tasks: Sequence[Task]) -> Evaluation:
        """Evaluate on `tasks`.

        Raises:
            PenstockError: If a task could not be sampled or scored. A failure is never counted as reward 0.
        """
        try:
            # Colocated engines must not be put to sleep between two turns, or while an answer is scored.
            with self._runner.pool.in_use():
                async with asyncio.TaskGroup() as group:
                    runs = [group.create_task(self._answer(index, task)) for index, task in enumerate(tasks)]
        except ExceptionGroup as failures:
            raise first_error(failures) from failures
        answers = [run.result() for run in runs]
        by_set: dict[str, list[float]] = {}
        for task, answer in zip(tasks, answers, strict=True):
            if answer.reward is not None:
                by_set.setdefault(task.evaluation_set, []).append(answer.reward)
        score = _score([reward for rewards in by_set.values() for reward in rewards])
        return Evaluation(
            step=step,
            accuracy=score.accuracy,
            reward_mean=score.reward_mean,
            version_min=min(answer.oldest_version for answer in answers),
            version_max=max(answer.newest_version for answer in answers),
            num_tasks=len(answers),
            sets={name: _score(rewards) for name, rewards in sorted(by_set.items()) if name},
        )

    async def _answer(self, index: int, task: Task) -> Trajectory:
        try:
            return await sample_and_score(
                self._runner, self._rewards, RolloutContext(task, "eval"), index, self._greedy
            )
        except TrajectoryError as failure:
            raise PenstockError(
                f"evaluation: {task.task_id} failed {MAX_ATTEMPTS} times; the last time: {failure}"
            ) from failure


def _score(rewards: Sequence[float]) -> SetScore:
    solved = sum(reward >= 1.0 for reward in rewards)
    return SetScore(solved / len(rewards), sum(rewards) / len(rewards), len(rewards))
