"""The flow: drives the sans-I/O dataflow core with real work, and hands batches to the trainer.

Consumes: tasks, while the admission gate has credits. Waits for: credits, engine slots, scores.
Unblocked by: `advance` (credits), a finished trajectory, a batch that closes. Every group runs in
one asyncio task; nothing here knows Ray, so the simulator runs the same code in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from penstock.dataflow.core import Dataflow
from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ids import GroupId, TrajectoryId
from penstock.dataflow.ledger import GroupState, LedgerCounts, Reason
from penstock.dataflow.ports import PayloadStore, RewardWorker, SamplingParams
from penstock.dataflow.trajectory import GroupPayload, GroupRef, Task, Trajectory
from penstock.platform.observability.flow_stats import FlowStats
from penstock.rollout.runner import TrajectoryRunner

FEWEST_FAILURES = 8
"""Failed groups in a row that stop the run, where the admission window is smaller."""

_OnGenerated = Callable[[], None]
_FAILURE_REASONS = {"env": Reason.ENV, "reward": Reason.REWARD, "engine": Reason.ENGINE}


@dataclass(frozen=True, slots=True)
class FlowPorts:
    """What the flow works with."""

    runner: TrajectoryRunner
    rewards: RewardWorker
    store: PayloadStore
    sampling: SamplingParams


class Flow:
    """Generators and reward workers at work; `async with` starts and ends them."""

    def __init__(
        self, core: Dataflow, tasks: Iterator[Task], ports: FlowPorts, stats: FlowStats, batch_timeout_s: float
    ) -> None:
        self.core = core
        self.stats = stats
        self._tasks = tasks
        self._ports = ports
        self._batch_timeout_s = batch_timeout_s
        self._changed = asyncio.Event()
        self._credits = asyncio.Event()
        self._groups: set[asyncio.Task[None]] = set()
        self._admission: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._failures_in_a_row = 0

    async def __aenter__(self) -> Self:
        self._credits.set()
        self._admission = asyncio.create_task(self._admit(), name="admission")
        self._admission.add_done_callback(self._watch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        under_way = [task for task in (self._admission, *self._groups) if task is not None]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self.core.finish()

    async def next_batch(self) -> AsyncIterator[GroupRef]:
        """The groups of the next batch in deadline order, once it may close.

        Raises:
            PenstockError: If nothing closes within the time limit; the message lists what it waits for.
        """
        for group in await self._close_batch():
            yield group

    def advance(self, version: int) -> None:
        """The batch was trained and published: frees its credits."""
        self.core.advance(version)
        self._credits.set()

    def skip(self) -> None:
        """The step was not taken: its groups are dropped(bad_step), their credits are free."""
        self.core.skip()
        self._credits.set()

    def counts(self) -> LedgerCounts:
        return self.core.ledger.counts()

    async def _close_batch(self) -> tuple[GroupRef, ...]:
        with self.stats.trainer_waits():
            try:
                async with asyncio.timeout(self._batch_timeout_s):
                    while (batch := self._try_close()) is None:
                        await self._changed.wait()
            except TimeoutError:
                raise PenstockError(
                    f"dataflow: no batch within batch_timeout_s={self._batch_timeout_s:.0f}: "
                    f"{self.core.waiting_for()}. The trainer stands still until it closes. "
                    "Look at the engines' logs, or raise dataflow.batch_timeout_s if generation only is slow."
                ) from None
        self.stats.batch_closed(batch, self.core.version)
        return batch

    def _try_close(self) -> tuple[GroupRef, ...] | None:
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        return self.core.close_batch()

    async def _admit(self) -> None:
        while True:
            while self.core.free_credits > 0:
                task = self._next_task()
                group_id = self.core.admit(task.task_id)
                job = asyncio.create_task(self._run_group(group_id, task), name=f"group {group_id}")
                self._groups.add(job)
                job.add_done_callback(self._watch)
            self._credits.clear()
            await self._credits.wait()

    def _next_task(self) -> Task:
        try:
            return next(self._tasks)
        except StopIteration:
            raise PenstockError(
                f"env: the task source ended after {self.core.ledger.counts().admitted} tasks. The run needs more: "
                "train() has to be endless (start over when the data ends), or lower total_steps."
            ) from None

    def _watch(self, job: asyncio.Task[None]) -> None:
        self._groups.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None and self._failure is None:
            self._failure = error
        self._changed.set()

    async def _run_group(self, group_id: GroupId, task: Task) -> None:
        outstanding = self.core.rules.group_size

        def member_generated() -> None:
            nonlocal outstanding
            outstanding -= 1
            if outstanding == 0:
                self.core.generated(group_id)

        async with asyncio.TaskGroup() as members:
            runs = [
                members.create_task(self._run_member(group_id, member, task, member_generated))
                for member in range(self.core.rules.group_size)
            ]
        outcomes = [run.result() for run in runs]
        good = tuple(outcome for outcome in outcomes if isinstance(outcome, Trajectory))
        if len(good) < self.core.rules.min_group_size:
            failure = next(outcome for outcome in outcomes if isinstance(outcome, TrajectoryError))
            self.stats.group_failed(failure)
            self.core.end(group_id, GroupState.FAILED, _FAILURE_REASONS[failure.kind])
            self._credits.set()
            self._count_failure(failure)
            return
        self._failures_in_a_row = 0
        self.core.ready(await self._store(group_id, task, good))
        self._changed.set()

    def _count_failure(self, failure: TrajectoryError) -> None:
        """Failed groups are replaced; a whole window of them in a row means that nothing will ever succeed."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= max(self.core.limits.window, FEWEST_FAILURES):
            raise PenstockError(
                f"dataflow: {self._failures_in_a_row} groups in a row failed, and none succeeded, after "
                f"{self.core.rules.max_retries} retries per trajectory. The last one: {failure.summary}"
            ) from failure

    async def _store(self, group_id: GroupId, task: Task, members: tuple[Trajectory, ...]) -> GroupRef:
        handle = await self._ports.store.put(GroupPayload(group_id, members))
        self.stats.group_ready(group_id, members)
        return GroupRef(
            group_id=group_id,
            task_id=task.task_id,
            handle=handle,
            spans=tuple(member.spans for member in members),
            rewards=tuple(member.reward for member in members if member.reward is not None),
            num_tokens=sum(len(member.token_ids) for member in members),
        )

    async def _run_member(
        self, group_id: GroupId, member: int, task: Task, on_generated: _OnGenerated
    ) -> Trajectory | TrajectoryError:
        """One member with its retries: a scored trajectory, or the failure that used up its budget."""
        attempts = 0
        counted = False
        while True:
            attempts += 1
            try:
                trajectory = await self._ports.runner.run(
                    task,
                    TrajectoryId(f"{group_id}/{member}"),
                    self._ports.sampling,
                    lambda version: self.core.member_at(group_id, member, version),
                )
                self.stats.trajectory_generated(trajectory)
                if not counted:
                    counted = True
                    on_generated()
                score = await self._ports.rewards.score(task, trajectory)
                return replace(trajectory, reward=score.reward, reward_parts=score.parts)
            except TrajectoryError as failure:
                if self.core.may_retry(failure.kind, attempts):
                    continue
                if not counted:
                    on_generated()
                return failure
