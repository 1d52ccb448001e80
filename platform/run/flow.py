"""The flow: drives the sans-I/O dataflow core with real work, and hands batches to the trainer.

Consumes: tasks, while the admission gate has credits. Waits for: credits, engine slots, scores.
Unblocked by: `advance` (credits), a finished trajectory, a batch that closes. Every trajectory runs in
one asyncio task (platform/run/group_run.py); nothing here knows Ray, so the simulator runs the same code in
virtual time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.dataflow.core import Dataflow
from penstock.dataflow.early_logprobs import EarlyLogprobsQueue
from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.filters import FilterChain
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ledger import GroupState, LedgerCounts, Reason
from penstock.dataflow.ports import EarlyLogprobWorker, LogprobWorker, PayloadStore, RewardWorker, SamplingParams
from penstock.dataflow.task_queue import TaskQueue
from penstock.dataflow.trajectory import GroupPayload, GroupRef, Trajectory
from penstock.platform.metrics.flow_stats import FlowStats
from penstock.platform.run.early_logprobs import EarlyLogprobs
from penstock.platform.run.group_run import GroupRun, Outcome
from penstock.rollout.trajectory.runner import RolloutRunner

logger = logging.getLogger(__name__)

LOG_IGNORED_EVERY_S = 60.0
"""Ignored reports are logged together, at most so often."""
MIN_FAILURES_TO_STOP = 8
"""Failed groups in a row that stop the run, where the admission window is smaller."""

_Taken = TypeVar("_Taken")
_FAILURE_REASONS = {"env": Reason.ENV, "reward": Reason.REWARD, "engine": Reason.ENGINE}


@dataclass(frozen=True, slots=True)
class FlowPorts:
    """What the flow works with.

    `reference` and `teacher` are asked for each group as soon as it is scored, `forward` while the trainer waits.
    """

    runner: RolloutRunner
    rewards: RewardWorker
    store: PayloadStore
    sampling: SamplingParams
    reference: LogprobWorker | None = None
    teacher: LogprobWorker | None = None
    forward: EarlyLogprobWorker | None = None


@dataclass(frozen=True, slots=True)
class FlowOptions:
    """How the flow hands out batches.

    Attributes:
        batch_timeout_s: Longest wait for a batch, seconds.
        streams_micro_batches: The trainer gets groups before their batch is complete.
        gang: All members of a group run on one engine, from one version on.
    """

    batch_timeout_s: float
    streams_micro_batches: bool = False
    gang: bool = False


class Flow:
    """Generators and reward workers at work; `async with` starts and ends them."""

    def __init__(
        self,
        core: Dataflow,
        tasks: TaskQueue,
        filters: FilterChain,
        ports: FlowPorts,
        stats: FlowStats,
        options: FlowOptions,
    ) -> None:
        self.core = core
        self.stats = stats
        self.ports = ports
        self._tasks = tasks
        self._filters = filters
        self.options = options
        self._changed = asyncio.Event()
        self._credits = asyncio.Event()
        self._groups: dict[GroupId, GroupRun] = {}
        self._admission: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[Any]] = set()
        self._failure: Exception | None = None
        self._failures_in_a_row = 0
        self._ignored_logged = 0
        self._ignored_logged_at = -math.inf
        queue = EarlyLogprobsQueue(core.limits.batch_groups, core.find_ready)
        self._prefetcher = None if ports.forward is None else EarlyLogprobs(ports.forward, queue)

    async def __aenter__(self) -> Self:
        self._admission = asyncio.create_task(self._admit(), name="admission")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._admission is not None:
            self._admission.cancel()
        for run in self._groups.values():
            self._ending.update(run.cancel())
        await asyncio.gather(*(job for job in (self._admission, *self._ending) if job), return_exceptions=True)
        self.core.finish()

    async def next_batch(self) -> AsyncIterator[GroupRef]:
        """The groups of the next batch in deadline order, once it may close, or each as soon as it may go in.

        Raises:
            PenstockError: If nothing closes within the time limit; the message lists what it waits for.
        """
        if self.options.streams_micro_batches:
            batch = []
            while not self.core.is_batch_complete:
                batch.append(await self._wait_for(self.core.take_one, num_needed=1))
                yield batch[-1]
            self._batch_closed(batch)
        else:
            waiting = self._wait_for(self.core.close_batch, self.core.limits.batch_groups)
            closed = await (waiting if self._prefetcher is None else self._prefetcher.during(waiting))
            self._batch_closed(closed)
            for group in closed:
                yield group

    async def fetch_batch(self) -> list[GroupPayload]:
        """The payloads of the batch that the trainer has, until `advance` or `skip`."""
        return [await self.ports.store.get(group.handle) for group in self.core.in_training]

    def advance(self, version: int) -> None:
        """The batch was trained and published: frees its credits."""
        self.core.advance(version)
        self._tasks.follow_curriculum(version, self.core.ledger)
        self._settle()

    def skip(self) -> None:
        """The step was not taken: its groups are dropped(bad_step), their credits are free."""
        self.core.skip()
        self._settle()

    @property
    def stream_weights(self) -> Mapping[str, float]:
        """Of the streams of tasks, now."""
        return self._tasks.weights

    def counts(self) -> LedgerCounts:
        return self.core.ledger.counts()

    def fail(self, error: Exception) -> None:
        """Something broke that is no failure of a trajectory: the trainer gets it, and the run stops."""
        if self._failure is None:
            self._failure = error
        self._changed.set()

    async def group_finished(self, run: GroupRun, outcomes: Sequence[Outcome]) -> None:
        """Every member of a group ended one way or the other: store it, filter it or fail it."""
        group_id = run.group_id
        good = tuple([outcome for outcome in outcomes if isinstance(outcome, Trajectory)])
        if len(good) < len(outcomes) and len(good) < self.core.rules.min_group_size:
            self._group_failed(group_id, next(outcome for outcome in outcomes if isinstance(outcome, TrajectoryError)))
            return
        try:
            reason = self._filters.judge(good)
        except TrajectoryError as failure:
            self._group_failed(group_id, failure)
            return
        self._failures_in_a_row = 0
        self._tasks.group_scored(run.queued, good)
        if reason is not None:
            self._end(group_id, GroupState.FILTERED, reason)
            return
        self.stats.group_ready(group_id, good)
        group = await self._store(run, good)
        self.core.ready(group)
        self._settle()
        if self._prefetcher is not None and self.core.find_ready(group_id) is not None:
            self._prefetcher.ready(group)

    async def _wait_for(self, take: Callable[[], _Taken | None], num_needed: int) -> _Taken:
        """What the core hands out, as soon as it does; `num_needed` ready groups are the fewest that may do."""
        try:
            async with asyncio.timeout(self.options.batch_timeout_s):
                while True:
                    if self._failure is not None:
                        raise self._failure
                    self._changed.clear()
                    if (taken := take()) is not None:
                        return taken
                    with self.stats.trainer_waits(self.core.wait_reason(num_needed)):
                        await self._changed.wait()
        except TimeoutError:
            raise PenstockError(
                f"dataflow: no batch within batch_timeout_s={self.options.batch_timeout_s:.0f}: "
                f"{self.core.describe_wait()}. The trainer stands still until it closes. "
                "Look at the engines' logs, or raise dataflow.batch_timeout_s if generation only is slow."
            ) from None

    def _batch_closed(self, batch: Sequence[GroupRef]) -> None:
        for group in batch:
            del self._groups[group.group_id]
        self._filters.batch_closed()
        self.stats.batch_closed(batch, self.core.version)
        self._settle()

    def _settle(self) -> None:
        """Carry out what the core has decided, and let admission and trainer look again."""
        self._log_ignored()
        for cancelled in self.core.take_cancelled():
            run = self._groups.pop(cancelled.group_id, None)
            self.stats.group_dropped(cancelled.group_id)
            if run is not None:
                for job in run.cancel():
                    self._ending.add(job)
                    job.add_done_callback(self._ending.discard)
                if cancelled.may_requeue:
                    self._tasks.requeue(run.queued, self.core.ledger)
        self._credits.set()
        self._changed.set()

    def _log_ignored(self) -> None:
        """Say that reports came which changed nothing, and why; not one by one."""
        core = self.core
        if not core.ignored or (total := core.ignored.total()) == self._ignored_logged:
            return
        now = asyncio.get_running_loop().time()
        if now < self._ignored_logged_at + LOG_IGNORED_EVERY_S:
            return
        logger.warning(
            "dataflow: %d reports changed nothing, %d since this was last said: %s since the start; the newest was "
            "about group %s of %d admitted. Nothing of them is trained. Who answers twice or too late sends such.",
            total,
            total - self._ignored_logged,
            ", ".join(f"{count} {why}" for why, count in sorted(core.ignored.items())),
            core.newest_ignored,
            core.ledger.num_admitted,
        )
        self._ignored_logged, self._ignored_logged_at = total, now

    async def _admit(self) -> None:
        try:
            while True:
                self._admit_now()
                self._credits.clear()
                await self._credits.wait()
        except Exception as error:  # noqa: BLE001 - a task source is the user's code
            self.fail(error)

    def _admit_now(self) -> None:
        """Start as many groups as there are credits, or as the streams have left of their quotas."""
        ledger = self.core.ledger
        for _ in range(self.core.free_credits):
            if (queued := self._tasks.next(ledger)) is None:
                return
            group_id = self.core.admit(
                queued.task.task_id, group_size=queued.group_size, stream=queued.stream, requeues=queued.requeues
            )
            self._groups[group_id] = run = GroupRun(self, group_id, queued)
            run.start()

    def _end(self, group_id: GroupId, state: GroupState, reason: Reason) -> None:
        self._groups.pop(group_id, None)
        self.core.end(group_id, state, reason)
        self._settle()

    def _group_failed(self, group_id: GroupId, failure: TrajectoryError) -> None:
        """Failed groups are replaced; a whole window of them in a row means that nothing will ever succeed."""
        self.stats.group_failed(failure)
        self._end(group_id, GroupState.FAILED, _FAILURE_REASONS[failure.kind])
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= max(self.core.limits.window, MIN_FAILURES_TO_STOP):
            raise PenstockError(
                f"dataflow: {self._failures_in_a_row} groups in a row failed, and none succeeded, after "
                f"{self.core.rules.retry_limit(failure.kind)} retries per trajectory. The last one: {failure.summary}"
            ) from failure

    async def _store(self, run: GroupRun, members: tuple[Trajectory, ...]) -> GroupRef:
        ports = self.ports
        handle = await ports.store.put(GroupPayload(run.group_id, members))
        reference = teacher = None
        if ports.reference is not None or ports.teacher is not None:
            frozen = (ports.reference, ports.teacher)
            reference, teacher = await asyncio.gather(*(_logprobs(worker, handle) for worker in frozen))
        return GroupRef(
            group_id=run.group_id,
            task_id=run.queued.task.task_id,
            handle=handle,
            spans=tuple([member.spans for member in members]),
            rewards=tuple([member.reward for member in members if member.reward is not None]),
            num_tokens=sum([len(member.token_ids) for member in members]),
            reference=reference,
            teacher=teacher,
        )


async def _logprobs(worker: LogprobWorker | None, handle: Any) -> Any:
    return None if worker is None else await worker.logprobs(handle)
