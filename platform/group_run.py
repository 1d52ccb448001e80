"""One group at work: its members sample and are scored side by side, each with its own retries.

Consumes: a queued task. Waits for: an engine slot and the tokens of each member, then its score. Unblocked by:
the members, one by one; whichever ends last reports the group. A group that the core gave up is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.dataflow.errors import FailureKind, TrajectoryError
from penstock.dataflow.ids import GroupId, TrajectoryId
from penstock.dataflow.ports import Score
from penstock.dataflow.seeding import trajectory_sampling
from penstock.dataflow.streams import QueuedTask
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.lease import Gang

if TYPE_CHECKING:
    from penstock.platform.flow import Flow


class GroupRun:
    """The running work of one group.

    Attributes:
        queued: The task and how many trajectories it gets.
    """

    __slots__ = (
        "_all_generated",
        "_flow",
        "_gang",
        "_jobs",
        "_outcomes",
        "_unfinished",
        "_ungenerated",
        "group_id",
        "queued",
    )

    def __init__(self, flow: Flow, group_id: GroupId, queued: QueuedTask) -> None:
        self.group_id = group_id
        self.queued = queued
        self._flow = flow
        self._ungenerated = (1 << queued.group_size) - 1  # one bit for each member
        self._unfinished = queued.group_size
        self._outcomes: list[Trajectory | TrajectoryError | None] = [None] * queued.group_size
        self._jobs: list[asyncio.Task[None]] = []
        self._gang: Gang | None = None
        self._all_generated: asyncio.Event | None = None

    def start(self) -> None:
        """Start every member; as a gang, once one engine has room for all of them."""
        if self._flow.options.gang:
            self._jobs.append(asyncio.get_running_loop().create_task(self._run_gang()))
        else:
            self._start_members()

    def _start_members(self) -> None:
        """Their tasks share a name and a context: thousands of each would be kept otherwise."""
        start, name, context = asyncio.get_running_loop().create_task, f"group {self.group_id}", copy_context()
        members = range(self.queued.group_size)
        self._jobs += [start(self._run_member(member), name=name, context=context) for member in members]

    def cancel(self) -> list[asyncio.Task[None]]:
        """Stop what still runs, engines are told to abort; returns what is still ending."""
        running = [job for job in self._jobs if not job.done()]
        for job in running:
            job.cancel()
        return running

    async def _run_gang(self) -> None:
        """Hold the slots of one engine until every member has its tokens."""
        pool = self._flow.ports.runner.pool
        self._all_generated = asyncio.Event()
        try:
            async with pool.gang(self.queued.task.task_id, self.queued.group_size) as self._gang:
                self._start_members()
                await self._all_generated.wait()
                self._gang = None  # a member that is sampled again takes any slot
        except Exception as error:  # noqa: BLE001 - as for a member
            self._flow.fail(error)

    async def _run_member(self, member: int) -> None:
        """Sample and score one trajectory, with its retries; the last member to end reports the group."""
        failures: Counter[FailureKind] | None = None
        try:
            while not isinstance(self._outcomes[member], Trajectory):
                try:
                    trajectory = await self._sampled(member)
                    self._flow.stats.trajectory_generated(trajectory)
                    self._member_generated(member)
                    score = await self._flow.ports.rewards.score(self.queued.task, trajectory)
                    self._member_scored(member, trajectory, score)
                except TrajectoryError as failure:
                    self._outcomes[member] = failure
                    failures = failures or Counter()
                    failures[failure.kind] += 1
                    if not self._flow.core.may_retry(failure.kind, failures[failure.kind]):
                        break
            self._member_generated(member)
            self._unfinished -= 1
            if self._unfinished == 0:
                await self._flow.group_finished(self, [outcome for outcome in self._outcomes if outcome is not None])
        except Exception as error:  # noqa: BLE001 - whatever it is stops the run, and is raised to the trainer
            self._flow.fail(error)

    def _sampled(self, member: int) -> Awaitable[Trajectory]:
        ports, limit = self._flow.ports, self.queued.max_new_tokens
        sampling = ports.sampling if limit is None else replace(ports.sampling, max_new_tokens=limit)
        return ports.runner.run(
            self.queued.task,
            TrajectoryId(f"{self.group_id}/{member}"),
            trajectory_sampling(sampling, self.group_id, member),
            watcher=self,
            member=member,
            slots=self._gang,
        )

    def member_at(self, member: int, version: int) -> None:
        """Which version samples a member; the runner tells."""
        self._flow.core.member_at(self.group_id, member, version)

    def _member_generated(self, member: int) -> None:
        """It has its tokens, or never will; once said, it may be said again."""
        if self._ungenerated == 0:
            return
        self._ungenerated &= ~(1 << member)
        if self._ungenerated == 0:
            self._flow.core.generated(self.group_id)
            if self._all_generated is not None:
                self._all_generated.set()

    def _member_scored(self, member: int, trajectory: Trajectory, score: Score) -> None:
        trajectory.score(score.reward, score.parts)
        failure = self._outcomes[member]
        if isinstance(failure, TrajectoryError):
            trajectory = replace(trajectory, retried_after=failure.summary)
        self._outcomes[member] = trajectory
