"""The running work of one group: its trajectories are sampled and scored concurrently, each with its own retries.

Consumes: a queued task. Waits for: a concurrency slot, the tokens and the score of each trajectory. Unblocked by: each
trajectory; the last one to end reports the group to the flow. A group that the core has ended is cancelled.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.saved_groups import Failure, MemberProgress, OpenGroup
from penstock.dataflow.task_queue import QueuedTask
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.trajectory.rollout_context import RolloutContext

if TYPE_CHECKING:
    from penstock.platform.run.flow import Flow


Outcome = Trajectory | TrajectoryError
"""Result of one trajectory of a group: the scored trajectory, or the error that ended its last attempt."""


class GroupRun:
    """The running work of one group.

    Attributes:
        queued: The task and how many trajectories it gets.
        group_id: Its admission number in the ledger.
        context: What its trajectories share while they are sampled.
        outcomes: Result of each trajectory; None while it runs. Empty once the group is ready.
        is_judged: Whether the filters and the hooks of the task queue have seen the group.
    """

    def __init__(self, flow: Flow, group_id: GroupId, queued: QueuedTask) -> None:
        self.queued = queued
        self.group_id = group_id
        self.context = RolloutContext(queued.task, group_id, partial(flow.record_version, group_id))
        self.outcomes: list[Outcome | None] = [None] * queued.group_size
        self.is_judged = False
        self._sampled: list[Trajectory | None] = [None] * queued.group_size
        self._failures: list[list[TrajectoryError]] = [[] for _ in range(queued.group_size)]
        self._flow = flow
        self._generating = set(range(queued.group_size))
        self._jobs: list[asyncio.Task[None]] = []

    def snapshot(self) -> OpenGroup:
        """What a checkpoint keeps: each member as far as it has come."""
        members = tuple([self._progress(index) for index in range(len(self.outcomes))])
        return OpenGroup(self.group_id, members, self.is_judged)

    def _progress(self, index: int) -> MemberProgress:
        outcome, sampled, turn = self.outcomes[index], self._sampled[index], self.context.turns.get(index)
        progress = MemberProgress(
            failures=tuple([Failure(one.kind, one.detail, one.is_final) for one in self._failures[index]]),
            has_failed=isinstance(outcome, TrajectoryError),
        )
        if isinstance(outcome, Trajectory):
            progress.trajectory = outcome
        elif outcome is None and sampled is not None:
            progress.trajectory = replace(sampled)  # it gets its reward while the checkpoint is being written
        elif outcome is None and turn is not None:
            progress.deltas = turn.deltas
        elif outcome is None and index in self.context.saved_tokens:  # it has not started since the last resume
            progress.deltas = (self.context.saved_tokens[index],)
        return progress

    def restore(self, saved: OpenGroup) -> None:
        """Continue where `snapshot` was taken. Call it before `start`."""
        self.is_judged = saved.is_judged
        for index, progress in enumerate(saved.members):
            failures = [TrajectoryError(one.kind, one.detail, is_final=one.is_final) for one in progress.failures]
            self._failures[index] = failures
            trajectory, partial = progress.trajectory, progress.partial
            self.context.is_answered |= trajectory is not None or partial is not None
            if progress.has_failed:
                self.outcomes[index] = failures[-1]
            elif trajectory is not None and trajectory.is_scored:
                self.outcomes[index] = trajectory
            elif trajectory is not None:
                self._sampled[index] = trajectory
            elif partial is not None:
                self.context.saved_tokens[index] = partial.delta()

    def start(self) -> None:
        """Start every trajectory that has not ended."""
        for index, outcome in enumerate(self.outcomes):
            if outcome is None:
                name = f"trajectory {self.context.trajectory_id(index)}"
                self._jobs.append(asyncio.create_task(self._run_trajectory(index), name=name))
            else:  # restored from a checkpoint
                self._mark_generated(index)
        if None not in self.outcomes:
            self._jobs.append(asyncio.create_task(self._report_restored(), name=f"group {self.context.name}"))

    def forget_trajectories(self) -> None:
        """Free the memory of a ready group, whose trajectories the store has: many groups may wait or be trained."""
        self.outcomes.clear()
        self._sampled.clear()
        self.context.prompts.clear()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel the running tasks, which abort their requests on the engines. Returns the tasks to await."""
        running = [job for job in self._jobs if not job.done()]
        for job in running:
            job.cancel()
        return running

    async def _run_trajectory(self, index: int) -> None:
        """Sample and score one trajectory, with its retries. The last one to end reports the group."""
        flow, ports, limit = self._flow, self._flow.ports, self.queued.max_new_tokens
        sampling = ports.sampling if limit is None else replace(ports.sampling, max_new_tokens=limit)
        sampling = sampling.of(self.group_id, index)
        failures = self._failures[index]
        try:
            while self.outcomes[index] is None:
                try:
                    trajectory = self._sampled[index]
                    if trajectory is None:
                        trajectory = await ports.runner.run(self.context, index, sampling)
                        flow.stats.trajectory_generated(trajectory)
                        self._sampled[index] = trajectory
                    self._mark_generated(index)
                    score = await ports.rewards.score(self.context.task, trajectory)
                    flow.stats.num_scored += 1
                    trajectory.score(score.reward, score.parts)
                    if trajectory.has_abstained:
                        flow.stats.abstained(self.context.task.task_id)
                    if failures:
                        trajectory = replace(trajectory, retried_after=failures[-1].summary)
                    self.outcomes[index] = trajectory
                except TrajectoryError as failure:
                    failures.append(failure)
                    flow.stats.anomalies.attempt_failed(self.context.task.task_id, failure)
                    self._sampled[index] = None
                    self.context.turns.pop(index, None)
                    attempts = sum(earlier.kind == failure.kind for earlier in failures)
                    if failure.is_final or not flow.core.grant_retry(failure.kind, attempts):
                        self._mark_generated(index)
                        self.outcomes[index] = failure
            outcomes = [outcome for outcome in self.outcomes if outcome is not None]
            if len(outcomes) == len(self.outcomes):
                await flow.group_finished(self, outcomes)
        except Exception as error:  # noqa: BLE001 - any other error stops the run and is raised to the trainer
            flow.fail(error)

    async def _report_restored(self) -> None:
        """Report a group all of whose trajectories had ended when the checkpoint was taken."""
        try:
            await self._flow.group_finished(self, [outcome for outcome in self.outcomes if outcome is not None])
        except Exception as error:  # noqa: BLE001 - as in `_run_trajectory`
            self._flow.fail(error)

    def _mark_generated(self, index: int) -> None:
        """Record that a trajectory has its tokens or has failed for good. The first time counts: a retry is no news."""
        if index in self._generating:
            self._generating.remove(index)
            if not self._generating:
                self._flow.core.generated(self.group_id)
