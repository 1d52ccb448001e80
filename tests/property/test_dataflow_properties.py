"""The core under random engines: short and long groups, failures, skipped steps, late reports.

A virtual run drives the real `Dataflow` to its end. Whatever the order in which groups finish, the
invariants I1, I2, I3, I5 and I6 hold after every event, and the run never gets stuck under `wait`.
"""

from __future__ import annotations

import heapq
import random

from hypothesis import given, settings
from hypothesis import strategies as st

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
    ) -> None:
        limits = FlowLimits(batch, eta, steps, surplus, policy)
        self.core = Dataflow(limits, GroupRules(2, 2, 1))
        self.cancelled: set[GroupId] = set()
        self.rng = random.Random(seed)
        self.sigma = sigma
        self.failure_rate = failure_rate
        self.now = 0.0
        self.running: list[tuple[float, GroupId]] = []
        self.started_at: dict[GroupId, int] = {}
        self.trained: list[GroupId] = []
        self.max_lag = 0

    def admit(self) -> None:
        while self.core.free_credits > 0:
            group = self.core.admit(TaskId("t"))
            for member in range(2):
                self.core.member_at(group, member, self.core.version)
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
                assert self.running, f"deadlock: {self.core.waiting_for()}"
                self.finish_one()
                continue
            for group in batch:
                self.max_lag = max(self.max_lag, *group.staleness_tokens(self.core.version))
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


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 6),
    eta=st.integers(0, 4),
    steps=st.integers(1, 15),
    sigma=st.floats(0.0, 2.0),
    failure_rate=st.sampled_from([0.0, 0.1, 0.4]),
    skip_rate=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_every_run_ends_bounded_and_balanced(
    batch: int, eta: int, steps: int, sigma: float, failure_rate: float, skip_rate: float, seed: int
) -> None:
    run = VirtualRun(batch, eta, steps, sigma, failure_rate, seed)
    run.run(skip_rate)
    assert run.max_lag <= eta  # I1
    assert len(run.trained) == len(set(run.trained)) == batch * steps  # I5
    counts = run.core.finish()
    assert counts.live == 0
    assert counts.trained == batch * steps
    assert counts.admitted - counts.returned == batch * steps  # credits all free when nothing is live


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 6),
    eta=st.integers(0, 4),
    sigma=st.floats(0.0, 2.0),
    failure_rate=st.sampled_from([0.0, 0.2]),
    policy=st.sampled_from([ExpiryPolicy.TRIM, ExpiryPolicy.DROP]),
    seed=st.integers(0, 2**32),
)
def test_trim_and_drop_keep_the_bound_and_the_books(
    batch: int, eta: int, sigma: float, failure_rate: float, policy: ExpiryPolicy, seed: int
) -> None:
    steps = 12
    run = VirtualRun(batch, eta, steps, sigma, failure_rate, seed, policy)
    run.run(skip_rate=0.1)
    assert run.max_lag <= eta
    assert len(run.trained) == len(set(run.trained)) == batch * steps
    counts = run.core.finish()
    assert counts.live == 0
    stale = run.core.ledger.reasons[GroupState.DROPPED, Reason.STALE]
    assert policy is ExpiryPolicy.DROP or stale <= counts.dropped


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 6),
    eta=st.integers(0, 3),
    sigma=st.floats(0.0, 2.0),
    surplus=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_redundant_groups_are_given_up_and_never_more_than_the_surplus_per_batch(
    batch: int, eta: int, sigma: float, surplus: int, seed: int
) -> None:
    steps = 12
    run = VirtualRun(batch, eta, steps, sigma, 0.0, seed, surplus=surplus)
    run.run(skip_rate=0.0)
    assert run.max_lag <= eta
    redundant = run.core.ledger.reasons[GroupState.DROPPED, Reason.REDUNDANT]
    assert redundant <= surplus * steps
    assert run.core.finish().trained == batch * steps


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 6),
    eta=st.integers(0, 4),
    sigma=st.floats(0.0, 2.0),
    failure_rate=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_batches_that_are_streamed_keep_the_same_bound(
    batch: int, eta: int, sigma: float, failure_rate: float, seed: int
) -> None:
    run = StreamedRun(batch, eta, 12, sigma, failure_rate, seed)
    run.run(skip_rate=0.1)
    assert run.max_lag <= eta
    assert run.core.finish().trained == batch * 12


def test_without_the_consumption_gate_lag_would_exceed_the_bound() -> None:
    """The planted violation: first-come first-served under the same admission gate goes beyond η."""
    rng = random.Random(0)
    batch, eta, worst = 4, 1, 0
    running = [(rng.lognormvariate(0, 1.5), 0) for _ in range((eta + 1) * batch)]
    for version in range(200):
        running.sort()
        taken, running = running[:batch], running[batch:]
        now = taken[-1][0]
        worst = max(worst, *(version - started for _, started in taken))
        running += [(now + rng.lognormvariate(0, 1.5), version + 1) for _ in range(batch)]
    assert worst > eta
