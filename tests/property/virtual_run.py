"""A virtual run that drives the real `Dataflow` to its end under random engines."""

from __future__ import annotations

import heapq
import random

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupState, Reason
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits
from penstock.dataflow.trajectory import GroupRef
from penstock.dataflow.versions import Span, join_spans


class VirtualRun:
    """Groups take lognormal time and span the versions published meanwhile; the trainer takes constant time."""

    def __init__(
        self,
        batch: int,
        eta: int,
        steps: int,
        sigma: float,
        failure_rate: float,
        seed: int,
        policy: ExpiryPolicy = ExpiryPolicy.WAIT,
        surplus: int = 0,
        *,
        adapts_surplus: bool = False,
    ) -> None:
        limits = FlowLimits(batch, eta, steps, surplus, policy, adapts_surplus=adapts_surplus)
        self.core = Dataflow(limits, GroupRules(2, 2, 1))
        self.cancelled: set[GroupId] = set()
        self.rng = random.Random(seed)
        self.sigma = sigma
        self.failure_rate = failure_rate
        self.now = 0.0
        self.running: list[tuple[float, GroupId]] = []
        self.started_at: dict[GroupId, int] = {}
        self.trained: list[GroupId] = []
        self.max_staleness = 0

    def admit(self) -> None:
        while self.core.free_credits > 0:
            group = self.core.admit(TaskId("t"))
            for member in range(2):
                self.core.record_version(group, member, self.core.version)
            self.started_at[group] = self.core.version
            heapq.heappush(self.running, (self.now + self.rng.lognormvariate(0, self.sigma), group))

    def finish_one(self) -> None:
        self.now, group = heapq.heappop(self.running)
        if group in self.cancelled:
            self.core.generated(group)  # late reports change nothing
            assert not self.core.ready(GroupRef(group, TaskId("t"), None, ((Span(0, 1),),), (0.0,), 2))
            return
        if self.rng.random() < self.failure_rate:
            self.core.end(group, GroupState.FAILED, Reason.ENGINE)
            return
        self.core.generated(group)
        first, last = self.started_at[group], self.core.version
        spans = join_spans([Span(version, 3) for version in range(first, last + 1)])
        self.core.ready(GroupRef(group, TaskId("t"), None, (spans, spans), (0.0, 1.0), 8))

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        return self.core.close_batch()

    def check(self) -> None:
        counts = self.core.ledger.counts()  # I3, raises if it does not balance
        assert self.core.free_credits >= 0  # I6
        assert counts.live <= self.core.limits.window

    def run(self, skip_rate: float) -> None:
        while self.core.version < self.core.limits.total_steps:
            self.admit()
            self.check()
            batch = self.close_batch()
            self.cancelled |= {cancelled.group_id for cancelled in self.core.take_cancelled()}
            if batch is None:
                assert self.running, f"deadlock: {self.core.describe_wait()}"
                self.finish_one()
                continue
            for group in batch:
                self.max_staleness = max(self.max_staleness, group.staleness(self.core.version))
            if self.rng.random() < skip_rate:
                self.core.skip()
                continue
            self.trained += [group.group_id for group in batch]
            self.core.advance(self.core.version + 1)
            self.cancelled |= {cancelled.group_id for cancelled in self.core.take_cancelled()}
            self.check()


class StreamedRun(VirtualRun):
    """The trainer takes groups one by one, before their batch is complete."""

    def __init__(self, batch: int, eta: int, steps: int, sigma: float, failure_rate: float, seed: int) -> None:
        super().__init__(batch, eta, steps, sigma, failure_rate, seed)
        self.open: list[GroupRef] = []

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        while (group := self.core.take_one()) is not None:
            self.open.append(group)
        if not self.core.is_batch_complete:
            return None
        batch, self.open = tuple(self.open), []
        return batch
