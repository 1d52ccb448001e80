"""The core under random engines: short and long groups, failures, skipped steps, late reports.

A virtual run drives the real `Dataflow` to its end. In any order in which groups finish, the
invariants I1, I2, I3, I5 and I6 hold after every event, and the run never gets stuck under `wait`.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataflow.ledger import GroupState, Reason
from penstock.dataflow.staleness import ExpiryPolicy
from penstock.dataflow.trajectory import GroupRef
from tests.property.virtual_run import StreamedRun, VirtualRun
from tests.tiers import examples


@settings(max_examples=examples(60), deadline=None)
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
    assert run.max_staleness <= eta  # I1
    assert len(run.trained) == len(set(run.trained)) == batch * steps  # I5
    counts = run.core.finish()
    assert counts.live == 0
    assert counts.trained == batch * steps
    assert counts.admitted - counts.returned == batch * steps  # credits all free when nothing is live


@settings(max_examples=examples(60), deadline=None)
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
    assert run.max_staleness <= eta
    assert len(run.trained) == len(set(run.trained)) == batch * steps
    counts = run.core.finish()
    assert counts.live == 0
    reasons = run.core.ledger.reasons
    assert counts.dropped == sum(reasons[GroupState.DROPPED, why] for why in (Reason.STALE, Reason.BAD_STEP))


@settings(max_examples=examples(60), deadline=None)
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
    assert run.max_staleness <= eta
    redundant = run.core.ledger.reasons[GroupState.DROPPED, Reason.REDUNDANT]
    assert redundant <= surplus * steps
    assert run.core.finish().trained == batch * steps


class AdaptedRun(VirtualRun):
    """The number of redundant groups is another one for every version: by the search, or at random."""

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        before = self.core.ledger.reasons[GroupState.DROPPED, Reason.REDUNDANT]
        batch = super().close_batch()
        given_up = self.core.ledger.reasons[GroupState.DROPPED, Reason.REDUNDANT] - before
        assert given_up <= self.core.surplus
        if batch is not None:
            outside = self.core.ledger.counts().live - len(batch)
            assert outside <= self.core.limits.max_staleness * len(batch), "no redundant group is left"
        return batch

    def check(self) -> None:
        super().check()
        if not self.core.in_training and self.core.version > self.seen:
            self.seen = self.core.version
            self.core.adapt_surplus(self.rng.lognormvariate(0, 1), self.rng.random())
            self.used.add(self.core.surplus)

    seen = 0
    used: set[int]


@settings(max_examples=examples(60), deadline=None)
@given(
    batch=st.integers(1, 6),
    eta=st.integers(0, 3),
    sigma=st.floats(0.0, 2.0),
    failure_rate=st.sampled_from([0.0, 0.2]),
    skip_rate=st.sampled_from([0.0, 0.2]),
    surplus=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_a_number_of_redundant_groups_that_changes_keeps_the_bound_and_never_blocks(
    batch: int, eta: int, sigma: float, failure_rate: float, skip_rate: float, surplus: int, seed: int
) -> None:
    steps = 40
    run = AdaptedRun(batch, eta, steps, sigma, failure_rate, seed, surplus=surplus, adapts_surplus=True)
    run.used = set()
    run.run(skip_rate)
    assert run.max_staleness <= eta
    assert len(run.trained) == len(set(run.trained)) == batch * steps
    assert len(run.used) > 1, "it did change"
    assert run.core.finish().trained == batch * steps


@settings(max_examples=examples(60), deadline=None)
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
    assert run.max_staleness <= eta
    assert run.core.finish().trained == batch * 12


def test_without_the_consumption_gate_staleness_would_exceed_the_bound() -> None:
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
