"""The flow: connects the sans-I/O dataflow core to engines and reward workers, and hands batches to the trainer.

Consumes: tasks, while the admission gate has free credits. Waits for: credits, concurrency slots of engines, scores.
Unblocked by: `advance` and a dispatched group (credits), a finished trajectory, a closed batch. Each trajectory runs in
its own asyncio task (platform/run/group_run.py). This module does not import Ray, so the simulator runs the same code
in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.dataflow.core import Dataflow
from penstock.dataflow.early_logprobs import EarlyLogprobsQueue
from penstock.dataflow.errors import (
    AccountingError,
    FailureKind,
    PenstockError,
    StalenessError,
    StepEndedError,
    TrainingError,
    TrajectoryError,
    WeightSendError,
)
from penstock.dataflow.filters import FilterChain
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupState, LedgerCounts, Reason
from penstock.dataflow.ports import PayloadStore, RewardWorker
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.saved_groups import OpenGroup
from penstock.dataflow.task_queue import QueuedTask, TaskQueue
from penstock.dataflow.trajectory import GroupPayload, GroupRef, Trajectory
from penstock.platform.metrics.flow_stats import FlowStats
from penstock.platform.run.early_logprobs import EarlyLogprobs, Forward
from penstock.platform.run.group_run import GroupRun, Outcome
from penstock.rollout.trajectory.runner import RolloutRunner

logger = logging.getLogger(__name__)

LOG_IGNORED_EVERY_S = 60.0
"""Shortest interval between two log lines about ignored reports, which are logged in aggregate."""
CHECKS_PER_TIMEOUT = 8
MIN_FAILURES_TO_STOP = 8
"""Lower limit of the number of consecutive failed groups that stops the run; the admission window if that is larger."""

FrozenLogprobs = Callable[[Any], Awaitable[Any]]
"""Handle of a group -> handle of `[n] float32`, a frozen policy's logprobs of its n sampled tokens, trajectories
concatenated. Raises TrajectoryError if they cannot be computed for this group."""
Accumulate = Callable[[Sequence[GroupRef]], Coroutine[Any, Any, None]]
_Result = TypeVar("_Result")
_FAILURE_REASONS: dict[FailureKind, Reason] = {
    "env": Reason.ENV,
    "long_prompt": Reason.LONG_PROMPT,
    "reward": Reason.REWARD,
    "engine": Reason.ENGINE,
}


@dataclass(frozen=True, slots=True)
class FlowPorts:
    """The workers and services that the flow calls."""

    runner: RolloutRunner
    """Samples trajectories on the engines."""
    rewards: RewardWorker
    """Scores trajectories."""
    store: PayloadStore
    """Holds the payloads of ready groups."""
    sampling: SamplingParams
    """Sampling parameters of the run."""
    reference: FrozenLogprobs | None = None
    """Computes reference logprobs of each group as soon as it is scored; None if the loss needs none."""
    teacher: FrozenLogprobs | None = None
    """Computes teacher logprobs likewise."""
    forward: Forward | None = None
    """Computes logprobs of ready groups early, while the trainer waits for its batch; None if disabled."""
    accumulate: Accumulate | None = None
    """Adds the gradient of a part of a batch, while the rest is being generated; None: the trainer gets whole batches.
    """


@dataclass(frozen=True, slots=True)
class FlowSnapshot:
    """The flow between two batches, as a checkpoint keeps it."""

    state: Mapping[str, Any]
    """Counters, task queue and groups, as JSON types."""
    ready: tuple[GroupRef, ...]
    """The ready groups; their payloads are in the store."""
    open_groups: tuple[OpenGroup, ...]
    """Groups that are being sampled or scored."""


class StopRequestedError(PenstockError):
    """The user has stopped the run. Raised to the training loop where it waits for the next batch."""


class Flow:
    """The running dataflow. `async with` starts admission on entry and cancels all running groups on exit.

    Attributes:
        last_snapshot: The flow when a stop or an error ended it between two batches; None if it ended otherwise.
    """

    def __init__(
        self,
        core: Dataflow,
        tasks: TaskQueue,
        filters: FilterChain,
        ports: FlowPorts,
        stats: FlowStats,
        batch_timeout_s: float,
        tokens_per_part: float = math.inf,
    ) -> None:
        """Prepare the flow; it begins when it is entered.

        Args:
            core: Decides what is admitted, trained and dropped.
            tasks: Where the groups come from.
            filters: Which groups are not trained.
            ports: What the flow calls.
            stats: Counts what it does.
            batch_timeout_s: Longest wait for a batch without progress: a token, a score or a ready group; seconds.
            tokens_per_part: Tokens of a part of a batch at most, with `FlowPorts.accumulate`.
        """
        self.core = core
        self.stats = stats
        self.ports = ports
        self._tasks = tasks
        self._filters = filters
        self._batch_timeout_s = batch_timeout_s
        self._tokens_per_part = tokens_per_part
        self._state_changed = asyncio.Event()
        self._credits_changed = asyncio.Event()
        self._groups: dict[GroupId, GroupRun] = {}
        self._in_batch: dict[GroupId, GroupRun] = {}
        self._admission: asyncio.Task[None] | None = None
        self._cancelled_jobs: set[asyncio.Task[Any]] = set()
        self._failure: Exception | None = None
        self._is_step_ended: asyncio.Future[bool] | None = None
        self._is_sending_parts = False
        self._consecutive_failures = 0
        self.last_snapshot: FlowSnapshot | None = None
        self.is_running = False
        self._version_began: tuple[float, float] | None = None  # when, and what the trainer had waited by then
        self._num_logged_ignored = 0
        self._ignored_logged_at = -math.inf
        queue = EarlyLogprobsQueue(core.limits.batch_groups, core.find_ready)
        self._early_logprobs = None if ports.forward is None else EarlyLogprobs(ports.forward, queue)

    async def __aenter__(self) -> Self:
        self.is_running = True
        for run in self._groups.values():  # restored from a checkpoint
            if self.core.find_ready(run.group_id) is None:
                run.start()
        self._admission = asyncio.create_task(self._admit(), name="admission")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_running = False
        # Not after an error of the books, which may be wrong, or of the trainer, which may be lost.
        is_resumable = isinstance(error, PenstockError) and not isinstance(
            error, AccountingError | StalenessError | TrainingError | WeightSendError
        )
        are_books_right = not isinstance(error, AccountingError | StalenessError)
        try:
            # The last part of a batch is not sent yet, and without it the weights do not change.
            was_step_ended = isinstance(error, StepEndedError) or (is_resumable and self._is_sending_parts)
            if self._is_step_ended is not None and not was_step_ended:
                was_step_ended = await asyncio.shield(self._is_step_ended)
            if was_step_ended and are_books_right:
                is_resumable = True
                self.core.ledger.listeners = ()  # what a resume continues has not ended
                self._return_batch()
            if is_resumable and not self.core.in_training:
                self.last_snapshot = self.snapshot()
            if isinstance(error, StopRequestedError) and self.last_snapshot is not None:
                self.core.ledger.listeners = ()
        finally:
            if self._admission is not None:
                self._admission.cancel()
            for run in self._groups.values():
                self._cancelled_jobs.update(run.cancel())
            jobs = (job for job in (self._admission, *self._cancelled_jobs) if job)
            await asyncio.gather(*jobs, return_exceptions=True)
            self.core.finish()

    async def next_batch(self) -> Sequence[GroupRef]:
        """Wait for the next batch; returns its groups in deadline order, or the last part of a batch in parts.

        Raises:
            PenstockError: If nothing progresses for `batch_timeout_s`. The message lists the unfinished groups.
        """
        if self.ports.accumulate is not None:
            return await self._last_part(self.ports.accumulate)
        waiting = self._wait_for(self.core.close_batch, self.core.limits.batch_groups)
        closed = await (waiting if self._early_logprobs is None else self._early_logprobs.during(waiting))
        self._batch_closed(closed)
        return closed

    async def _last_part(self, accumulate: Accumulate) -> list[GroupRef]:
        """Send each part of the next batch to the trainer as soon as its groups may join; returns the last part."""
        batch: list[GroupRef] = []
        part: list[GroupRef] = []
        self._is_sending_parts = True
        try:
            async with asyncio.TaskGroup() as sent:  # a failing rank ends the wait for further groups
                while not self.core.is_batch_complete:
                    group = await self._wait_for(self.core.take_one, num_needed=1)
                    if part and sum(one.num_tokens for one in part) + group.num_tokens > self._tokens_per_part:
                        sent.create_task(accumulate(part))
                        part = []
                    part.append(group)
                    batch.append(group)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._is_sending_parts = False
        self._batch_closed(batch)
        return part

    async def fetch_batch(self) -> list[GroupPayload]:
        """Fetch the payloads of the batch in training. Valid until `advance` or `skip`."""
        return [await self.ports.store.get(group.handle) for group in self.core.in_training]

    def advance(self, version: int) -> None:
        """Record that the batch in training was trained and published as `version`; frees its credits."""
        self.core.advance(version)
        if self.core.surplus_search is not None:
            self._adapt_surplus()
        self._in_batch.clear()
        self._tasks.follow_curriculum(version, self.core.ledger)
        self._settle()

    def _adapt_surplus(self) -> None:
        """Choose the redundant groups of the next batch by what this version took, unless a skipped step was in it."""
        now, waited_s = asyncio.get_running_loop().time(), sum(self.stats.trainer_wait_for.values())
        if self._version_began is not None:
            began_at, had_waited_s = self._version_began
            self.core.adapt_surplus(now - began_at, waited_s - had_waited_s)
        self._version_began = now, waited_s

    def record_version(self, group_id: GroupId, member: int, version: int) -> None:
        """Record which version samples a trajectory. A group that was waiting for an engine may free a credit."""
        self.core.record_version(group_id, member, version)
        self._credits_changed.set()

    def set_total_steps(self, total_steps: int) -> None:
        """Train so many batches in all, from now on. After the last step, more of them free credits."""
        self.core.set_total_steps(total_steps)
        self._credits_changed.set()

    def skip(self) -> None:
        """Record that the optimizer step was skipped: its groups end as dropped(bad_step) and free their credits."""
        self.core.skip()
        self._version_began = None
        self._in_batch.clear()
        self._settle()

    @property
    def stream_weights(self) -> Mapping[str, float]:
        """Current weight of each task stream."""
        return self._tasks.weights

    def skipped_tasks(self) -> tuple[int, int, str | None]:
        """Tasks taken from all streams, how many of them do not fit and were never admitted, and the first of these."""
        tasks = self._tasks
        return tasks.num_taken.total(), tasks.num_skipped.total(), tasks.first_skipped

    def counts(self) -> LedgerCounts:
        return self.core.ledger.counts()

    def snapshot(self) -> FlowSnapshot:
        """What a checkpoint keeps of the flow, taken at the cut: between `advance` and the next batch.

        It holds references only; trajectories that change later are copied.
        """
        ready, open_groups, max_new_tokens = [], [], {}
        for record in self.core.ledger.live():
            max_new_tokens[str(record.group_id)] = self._groups[record.group_id].queued.max_new_tokens
            if record.ready is not None:
                ready.append(record.ready)
            else:
                open_groups.append(self._groups[record.group_id].snapshot())
        state = {
            "limits": self._bounds(),
            "core": self.core.state_dict(),
            "max_new_tokens": max_new_tokens,
            "tasks": self._tasks.state_dict(),
            "num_taken": dict(self._tasks.num_taken),
            "stats": self.stats.state_dict(),
        }
        return FlowSnapshot(state, tuple(ready), tuple(open_groups))

    async def restore(self, saved: FlowSnapshot, payloads: Mapping[GroupId, GroupPayload]) -> None:
        """Continue where `snapshot` was taken. Call it before the flow starts.

        Under other bounds than then, live groups end as dropped(rollback) and their tasks start again. Filtered and
        failed groups in a row count from 0: a run that they stopped may go on once their cause is mended.

        Args:
            saved: The snapshot; its ready groups have no handles.
            payloads: Payloads of the ready groups.

        Raises:
            PenstockError: If a task of a live group is no longer in its source.
        """
        core = saved.state["core"]
        live = {GroupId(group["group_id"]): group for group in core["groups"]}
        keys = {group_id: (group["stream"], TaskId(group["task_id"])) for group_id, group in live.items()}
        tasks = self._tasks.load_state_dict(saved.state["tasks"], saved.state["num_taken"], keys.values())
        self.stats.load_state_dict(saved.state["stats"])
        max_new_tokens = saved.state["max_new_tokens"]
        for group_id, group in live.items():
            queued = QueuedTask(
                tasks[keys[group_id]],
                group["stream"],
                group["group_size"],
                group["requeues"],
                max_new_tokens[str(group_id)],
            )
            self._groups[group_id] = GroupRun(self, group_id, queued)
        ready, failed = {}, {}
        for group_id, payload in payloads.items():
            try:
                ready[group_id] = await self._store(self._groups[group_id], payload.trajectories)
            except TrajectoryError as failure:
                failed[group_id] = failure
            else:
                self.stats.group_ready(group_id, payload.trajectories)
        self.core.load_state_dict(core, ready)
        for group_id, error in failed.items():
            self._group_failed(self._groups[group_id], error)
        for group in saved.open_groups:
            self._groups[group.group_id].restore(group)
        limits = self.core.limits
        num_needed = (limits.total_steps - self.core.version) * limits.batch_groups
        if saved.state["limits"] != self._bounds() or len(live) > num_needed:
            for group_id in self.core.roll_back():
                self.stats.group_dropped(group_id)
                self._tasks.requeue(self._groups.pop(group_id).queued, self.core.ledger, is_charged=False)

    def _bounds(self) -> list[Any]:
        """The limits under which live groups were admitted."""
        limits = self.core.limits
        bounds = [limits.batch_groups, limits.max_staleness, limits.surplus, str(limits.on_expiry)]
        return [*bounds, "adapted"] if limits.adapts_surplus else bounds

    def fail(self, error: Exception) -> None:
        """Stop the run with an error that is not a `TrajectoryError`; `next_batch` raises it to the trainer."""
        # The first error is kept: later ones are often its consequences.
        if self._failure is None:
            self._failure = error
        self._state_changed.set()

    def stop(self, is_step_ended: asyncio.Future[bool]) -> None:
        """End the flow where the training loop waits for a batch, or where it is cancelled.

        Args:
            is_step_ended: Result: whether a running step ends without an effect. Then its batch is ready again.
        """
        self._is_step_ended = is_step_ended
        self.fail(StopRequestedError(f"the run was stopped at v{self.core.version}"))

    async def group_finished(self, run: GroupRun, outcomes: Sequence[Outcome]) -> None:
        """Store, filter or fail a group all of whose trajectories have ended."""
        group_id, least = run.group_id, self.core.rules.min_group_size
        answered = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
        if len(answered) < len(outcomes) and len(answered) < least:
            self._group_failed(run, next(outcome for outcome in outcomes if isinstance(outcome, TrajectoryError)))
            return
        # Without an opinion there is no reward, so nothing to train and no part of the baseline.
        trajectories = tuple([trajectory for trajectory in answered if not trajectory.has_abstained])
        if len(trajectories) < len(answered) and len(trajectories) < least:
            self._consecutive_failures = 0
            self._filters.count(Reason.ABSTAINED)
            self._end(group_id, GroupState.FILTERED, Reason.ABSTAINED)
            return
        if not run.is_judged:
            self.stats.anomalies.group_scored(trajectories)
            try:
                reason = self._filters.judge(trajectories)
            except TrajectoryError as failure:
                self._group_failed(run, failure)
                return
            run.is_judged = True
            self._tasks.group_scored(run.queued, trajectories)
            if reason is not None:
                self._consecutive_failures = 0
                self._end(group_id, GroupState.FILTERED, reason)
                return
        try:
            group = await self._store(run, trajectories)
        except TrajectoryError as failure:
            self._group_failed(run, failure)
            return
        self._consecutive_failures = 0
        self.stats.group_ready(group_id, trajectories)
        self.core.ready(group)
        run.forget_trajectories()
        self.stats.num_ready += 1
        self._settle()
        # `_settle` has woken the trainer first: if this group completes the batch, no early forward may delay it. The
        # core may also have ended the group as too old, so its state is read again.
        if self._early_logprobs is not None and self.core.find_ready(group_id) is not None:
            self._early_logprobs.ready(group)

    async def _wait_for(self, take: Callable[[], _Result | None], num_needed: int) -> _Result:
        """Wait until `take` returns a result. `num_needed` is the lowest number of ready groups with which it can."""
        # The limit is a number of checks without progress, not a time. So a driver that stood still loses one check.
        loop, check_s = asyncio.get_running_loop(), self._batch_timeout_s / CHECKS_PER_TIMEOUT
        progress, checks_left, check_at = self._progress(), CHECKS_PER_TIMEOUT, loop.time() + check_s
        while True:
            if self._failure is not None:
                raise self._failure
            # Cleared before `take`, so that a change during the call is not lost.
            self._state_changed.clear()
            if (result := take()) is not None:
                return result
            with self.stats.trainer_waits(self.core.wait_reason(num_needed)), contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(check_at):
                    await self._state_changed.wait()
            if loop.time() < check_at:
                continue
            before, progress = progress, self._progress()
            checks_left = checks_left - 1 if progress == before else CHECKS_PER_TIMEOUT
            check_at = loop.time() + check_s
            if not checks_left:
                raise PenstockError(
                    f"dataflow: no batch: no token, score or ready group within "
                    f"batch_timeout_s={self._batch_timeout_s:g}: {self.core.describe_wait()}. The trainer is "
                    "idle until a batch closes. Check the engines' logs, or raise dataflow.batch_timeout_s if one "
                    "score or environment step may take longer."
                )

    def _progress(self) -> tuple[int, int, int]:
        """Counters that grow while the run makes progress towards its next batch."""
        return self.ports.runner.stats.received_tokens, self.stats.num_scored, self.stats.num_ready

    def _batch_closed(self, batch: Sequence[GroupRef]) -> None:
        for group in batch:
            self._in_batch[group.group_id] = self._groups.pop(group.group_id)
        self._filters.batch_closed()
        self.stats.batch_closed(batch, self.core.version)
        self._settle()

    def _return_batch(self) -> None:
        """Take back a batch, whole or in parts, whose step was ended before it changed the weights."""
        if self._in_batch:
            self.stats.batch_returned(self.core.in_training)
        self._groups.update(self._in_batch)
        self._in_batch.clear()
        self.core.return_batch()

    def _settle(self) -> None:
        """Apply the decisions of the core, then wake the admission task and the waiting trainer."""
        self._log_ignored()
        for cancelled in self.core.take_cancelled():
            run = self._groups.pop(cancelled.group_id, None)
            self.stats.group_dropped(cancelled.group_id)
            if run is not None:
                for job in run.cancel():
                    self._cancelled_jobs.add(job)
                    job.add_done_callback(self._cancelled_jobs.discard)
                if cancelled.may_requeue:
                    self._tasks.requeue(run.queued, self.core.ledger)
        self._credits_changed.set()
        self._state_changed.set()

    def _log_ignored(self) -> None:
        """Log reports that the core ignored, with the reasons, in aggregate."""
        core = self.core
        if not core.ignored or (total := core.ignored.total()) == self._num_logged_ignored:
            return
        now = asyncio.get_running_loop().time()
        if now < self._ignored_logged_at + LOG_IGNORED_EVERY_S:
            return
        logger.warning(
            "dataflow: %d reports were ignored, %d since the last such message: %s since the start; the newest was "
            "about group %s of %d admitted. Ignored reports are not trained. Workers that answer twice or too late "
            "cause them.",
            total,
            total - self._num_logged_ignored,
            ", ".join(f"{count} {cause}" for cause, count in sorted(core.ignored.items())),
            core.newest_ignored,
            core.ledger.num_admitted,
        )
        self._num_logged_ignored, self._ignored_logged_at = total, now

    async def _admit(self) -> None:
        try:
            while True:
                self._admit_now()
                self._credits_changed.clear()
                await self._credits_changed.wait()
        except Exception as error:  # noqa: BLE001 - a task source is the user's code
            self.fail(error)

    def _admit_now(self) -> None:
        """Start groups until the credits or the quotas of the task streams are used up."""
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

    def _group_failed(self, run: GroupRun, failure: TrajectoryError) -> None:
        """End a failed group. Its credit admits another one; too many consecutive failures stop the run.

        Raises:
            PenstockError: After a whole admission window of consecutive failures.
        """
        self.stats.group_failed(failure)
        self._end(run.group_id, GroupState.FAILED, _FAILURE_REASONS[failure.kind])
        if run.context.is_suspect:  # most such prompts are innocent, and lost engines have a limit of their own
            return
        self._consecutive_failures += 1
        if self._consecutive_failures >= max(self.core.limits.window, MIN_FAILURES_TO_STOP):
            raise PenstockError(
                f"dataflow: {self._consecutive_failures} groups in a row failed, after "
                f"{self.core.rules.retry_limit(failure.kind)} retries per trajectory. The last one: {failure.summary}"
            ) from failure

    async def _store(self, run: GroupRun, trajectories: tuple[Trajectory, ...]) -> GroupRef:
        """Store the payload and compute the logprobs of the frozen policies, reference and teacher concurrently.

        Raises:
            TrajectoryError: If a frozen policy cannot compute the logprobs of this group.
        """
        ports = self.ports
        handle = await ports.store.put(GroupPayload(run.group_id, trajectories))
        reference = teacher = None
        if ports.reference is not None or ports.teacher is not None:
            frozen = (ports.reference, ports.teacher)
            reference, teacher = await asyncio.gather(*(_logprobs(of_group, handle) for of_group in frozen))
        return GroupRef(
            group_id=run.group_id,
            task_id=run.queued.task.task_id,
            handle=handle,
            spans=tuple([trajectory.spans for trajectory in trajectories]),
            rewards=tuple([trajectory.reward for trajectory in trajectories if trajectory.reward is not None]),
            num_tokens=sum([len(trajectory.token_ids) for trajectory in trajectories]),
            reference=reference,
            teacher=teacher,
        )


async def _logprobs(of_group: FrozenLogprobs | None, handle: Any) -> Any:
    return None if of_group is None else await of_group(handle)
