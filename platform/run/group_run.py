"""One group at work: its members sample and are scored side by side, each with its own retries.

Consumes: a queued task. Waits for: an engine slot and the tokens of each member, then its score. Unblocked by:
the members, one by one; whichever ends last reports the group. A group that the core gave up is cancelled.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.seeding import trajectory_sampling
from penstock.dataflow.task_queue import QueuedTask
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.trajectory.group_task import RolloutContext

if TYPE_CHECKING:
    from penstock.platform.run.flow import Flow


Outcome = Trajectory | TrajectoryError
"""What a member comes to."""


class GroupRun(RolloutContext):
    """The running work of one group.

    Attributes:
        queued: The task and how many trajectories it gets.
        group_id: Its number in the ledger.
        outcomes: Of its members, what each came to; None while it runs.
    """

    def __init__(self, flow: Flow, group_id: GroupId, queued: QueuedTask) -> None:
        super().__init__(queued.task, group_id)
        self.queued = queued
        self.group_id = group_id
        self.outcomes: list[Outcome | None] = [None] * queued.group_size
        self._flow = flow
        self._without_tokens = set(range(queued.group_size))
        self._jobs: list[asyncio.Task[None]] = []
        self._all_generated = asyncio.Event()

    def start(self) -> None:
        """Start every member; as a gang, once one engine has room for all of them."""
        if self._flow.options.gang:
            self._jobs.append(asyncio.create_task(self._run_gang(), name=f"gang {self.name}"))
        else:
            self._start_members()

    def _start_members(self) -> None:
        for member in range(self.queued.group_size):
            name = f"trajectory {self.trajectory_id(member)}"
            self._jobs.append(asyncio.create_task(self._run_member(member), name=name))

    def cancel(self) -> list[asyncio.Task[None]]:
        """Stop what still runs, engines are told to abort; returns what is still ending."""
        running = [job for job in self._jobs if not job.done()]
        for job in running:
            job.cancel()
        return running

    async def _run_gang(self) -> None:
        """Hold the slots of one engine until every member has its tokens.

        A wait for slots that is too long is a failed attempt of all members: retried as one of them would be.
        """
        pool, attempts, size = self._flow.ports.runner.pool, 0, self.queued.group_size
        try:
            while not self._all_generated.is_set():
                try:
                    async with pool.gang(self.task.task_id, size) as self.slots:
                        self._start_members()
                        await self._all_generated.wait()
                        self.slots = None  # a member that is sampled again takes any slot
                except TrajectoryError as failure:
                    attempts += 1
                    if not self._flow.core.grant_retry(failure.kind, attempts):
                        await self._flow.group_finished(self, [failure] * size)
                        return
        except Exception as error:  # noqa: BLE001 - as for a member
            self._flow.fail(error)

    async def _run_member(self, member: int) -> None:
        """Sample and score one trajectory, with its retries; the last member to end reports the group."""
        flow, ports, limit = self._flow, self._flow.ports, self.queued.max_new_tokens
        sampling = ports.sampling if limit is None else replace(ports.sampling, max_new_tokens=limit)
        sampling = trajectory_sampling(sampling, self.group_id, member)
        failures: list[TrajectoryError] = []
        try:
            while self.outcomes[member] is None:
                try:
                    trajectory = await ports.runner.run(self, member, sampling)
                    flow.stats.trajectory_generated(trajectory)
                    self._has_tokens(member)
                    score = await ports.rewards.score(self.task, trajectory)
                    trajectory.score(score.reward, score.parts)
                    if failures:
                        trajectory = replace(trajectory, retried_after=failures[-1].summary)
                    self.outcomes[member] = trajectory
                except TrajectoryError as failure:
                    failures.append(failure)
                    attempts = sum(one.kind == failure.kind for one in failures)
                    if failure.is_final or not flow.core.grant_retry(failure.kind, attempts):
                        self._has_tokens(member)
                        self.outcomes[member] = failure
            outcomes = [outcome for outcome in self.outcomes if outcome is not None]
            if len(outcomes) == len(self.outcomes):
                await flow.group_finished(self, outcomes)
        except Exception as error:  # noqa: BLE001 - whatever it is stops the run, and is raised to the trainer
            flow.fail(error)

    def record_version(self, member: int, version: int) -> None:
        """Which version samples a member; the runner tells."""
        self._flow.core.record_version(self.group_id, member, version)

    def _has_tokens(self, member: int) -> None:
        """A member has its tokens, or never will; one that is sampled again says so again."""
        self._without_tokens.discard(member)
        if not self._all_generated.is_set() and not self._without_tokens:
            self._flow.core.generated(self.group_id)
            self._all_generated.set()
