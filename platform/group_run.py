"""One group at work: its members sample and are scored side by side, each with its own retries.

Consumes: a queued task. Waits for: an engine slot and the tokens of each member, then its score. Unblocked by:
the members, one by one; whichever ends last reports the group. A group that the core gave up is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ports import Score
from penstock.dataflow.seeding import trajectory_sampling
from penstock.dataflow.streams import QueuedTask
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.group_task import GroupTask

if TYPE_CHECKING:
    from penstock.platform.flow import Flow


Outcome = Trajectory | TrajectoryError
"""What a member comes to."""


class GroupRun(GroupTask):
    """The running work of one group.

    Attributes:
        queued: The task and how many trajectories it gets.
    """

    __slots__ = ("_all_generated", "_failures", "_flow", "_gang", "_jobs", "_unfinished", "_ungenerated", "queued")

    group: GroupId

    def __init__(self, flow: Flow, group_id: GroupId, queued: QueuedTask) -> None:
        super().__init__(queued.task, group_id)
        self.queued = queued
        self._flow = flow
        self._ungenerated = (1 << queued.group_size) - 1  # one bit for each member
        self._unfinished = queued.group_size
        self._failures: dict[int, list[TrajectoryError]] | None = None  # by member; most groups never have one
        self._jobs: tuple[asyncio.Task[Outcome | None], ...] = ()
        self._gang: asyncio.Task[None] | None = None
        self._all_generated: asyncio.Event | None = None

    @property
    def group_id(self) -> GroupId:
        return self.group

    def start(self) -> None:
        """Start every member; as a gang, once one engine has room for all of them."""
        if self._flow.options.gang:
            self._gang = asyncio.get_running_loop().create_task(self._run_gang())
        else:
            self._start_members()

    def _start_members(self) -> None:
        """Their tasks share a name and a context: thousands of each would be kept otherwise."""
        start, name, context = asyncio.get_running_loop().create_task, f"group {self.name}", self._flow.context
        members = range(self.queued.group_size)
        self._jobs = tuple([start(self._run_member(member), name=name, context=context) for member in members])

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Stop what still runs, engines are told to abort; returns what is still ending."""
        jobs = self._jobs if self._gang is None else (self._gang, *self._jobs)
        running = [job for job in jobs if not job.done()]
        for job in running:
            job.cancel()
        return running

    async def _run_gang(self) -> None:
        """Hold the slots of one engine until every member has its tokens.

        A wait for slots that is too long is a failed attempt of all members: retried as one of them would be.
        """
        pool, attempts = self._flow.ports.runner.pool, 0
        self._all_generated = asyncio.Event()
        try:
            while not self._jobs:
                try:
                    async with pool.gang(self.task.task_id, self.queued.group_size) as self.slots:
                        self._start_members()
                        await self._all_generated.wait()
                        self.slots = None  # a member that is sampled again takes any slot
                except TrajectoryError as failure:
                    attempts += 1
                    if not self._flow.core.may_retry(failure.kind, attempts):
                        await self._flow.group_finished(self, [failure] * self.queued.group_size)
                        return
        except Exception as error:  # noqa: BLE001 - as for a member
            self._flow.fail(error)

    async def _run_member(self, member: int) -> Outcome | None:
        """Sample and score one trajectory, with its retries; the last member to end reports the group."""
        try:
            outcome: Outcome | None = None
            while outcome is None:
                try:
                    outcome = await self._sampled(member)
                    self._member_generated(member, outcome)
                    score = await self._flow.ports.rewards.score(self.task, outcome)
                    outcome = self._member_scored(member, outcome, score)
                except TrajectoryError as error:
                    outcome = self._member_failed(member, error)
            self._unfinished -= 1
            if self._unfinished == 0:
                await self._finish(member, outcome)
            return outcome
        except Exception as error:  # noqa: BLE001 - whatever it is stops the run, and is raised to the trainer
            self._flow.fail(error)
            return None

    def _finish(self, last: int, outcome: Outcome) -> Awaitable[None]:
        """Report what all members came to, in their order; the tasks of all but the `last` are done."""
        ended = [outcome if member == last else job.result() for member, job in enumerate(self._jobs)]
        return self._flow.group_finished(self, [one for one in ended if one is not None])

    def _sampled(self, member: int) -> Awaitable[Trajectory]:
        ports, limit = self._flow.ports, self.queued.max_new_tokens
        sampling = ports.sampling if limit is None else replace(ports.sampling, max_new_tokens=limit)
        return ports.runner.run(self, member, trajectory_sampling(sampling, self.group, member))

    def member_at(self, member: int, version: int) -> None:
        """Which version samples a member; the runner tells."""
        self._flow.core.member_at(self.group, member, version)

    def _member_generated(self, member: int, trajectory: Trajectory | None) -> None:
        """It has its tokens, or never will; once said, it may be said again."""
        if trajectory is not None:
            self._flow.stats.trajectory_generated(trajectory)
        if self._ungenerated == 0:
            return
        self._ungenerated &= ~(1 << member)
        if self._ungenerated == 0:
            self._flow.core.generated(self.group)
            if self._all_generated is not None:
                self._all_generated.set()

    def _member_scored(self, member: int, trajectory: Trajectory, score: Score) -> Trajectory:
        trajectory.score(score.reward, score.parts)
        if self._failures is not None and member in self._failures:
            return replace(trajectory, retried_after=self._failures[member][-1].summary)
        return trajectory

    def _member_failed(self, member: int, failure: TrajectoryError) -> TrajectoryError | None:
        """What it comes to; None if it gets another attempt."""
        if self._failures is None:
            self._failures = {}
        failures = self._failures.setdefault(member, [])
        failures.append(failure)
        attempts = sum(one.kind == failure.kind for one in failures)
        if not failure.is_final and self._flow.core.may_retry(failure.kind, attempts):
            return None
        self._member_generated(member, None)
        return failure
