"""Both gates on small worked examples; the numbers are counted by hand."""

from __future__ import annotations

import pytest

from penstock.dataflow.gates import free_credits
from penstock.dataflow.ids import GroupId
from penstock.dataflow.staleness import FlowLimits
from tests.staleness_definition import Candidate, choose_batch, is_feasible

B2_ETA1 = FlowLimits(batch_groups=2, max_staleness=1, total_steps=10)


def candidate(group: int, deadline: int, *, ready: bool = True) -> Candidate:
    return Candidate(GroupId(group), deadline, ready)


@pytest.mark.parametrize(
    ("admitted", "returned", "trained", "free"),
    [
        (0, 0, 0, 4),  # (1 + 1) · 2
        (4, 0, 0, 0),
        (4, 1, 0, 1),  # a group that ended untrained gives its credit back at once
        (4, 0, 2, 2),
        (20, 0, 18, 0),  # 10 · 2 admitted: the run needs no more
        (19, 0, 18, 1),
        (21, 1, 18, 0),
    ],
)
def test_credits_follow_from_absolute_counters(admitted: int, returned: int, trained: int, free: int) -> None:
    assert free_credits(B2_ETA1, admitted=admitted, returned=returned, trained=trained, version=trained // 2) == free


def test_what_the_run_still_needs_counts_from_its_version_whatever_the_batches_were_before() -> None:
    # Nine batches of four groups were trained, then the batch became two.
    assert free_credits(B2_ETA1, admitted=36, returned=0, trained=36, version=9) == 2
    assert free_credits(B2_ETA1, admitted=36, returned=0, trained=36, version=8) == 4


@pytest.mark.parametrize(
    ("waiting", "admitted", "free"),
    [
        (0, 0, 4),  # η = 8: the window has 18
        (3, 3, 1),
        (4, 4, 0),
        (0, 4, 4),  # engines have taken all four
        (4, 16, 0),
        (7, 16, 0),  # what was generating is ready: the limit is on admission
        (1, 16, 2),  # the window
    ],
)
def test_no_group_is_admitted_while_two_batches_wait(waiting: int, admitted: int, free: int) -> None:
    limits = FlowLimits(batch_groups=2, max_staleness=8, total_steps=100)
    assert free_credits(limits, admitted=admitted, returned=0, trained=0, version=0, waiting=waiting) == free


def test_surplus_widens_the_window() -> None:
    limits = FlowLimits(batch_groups=2, max_staleness=0, total_steps=10, surplus=3)
    assert free_credits(limits, admitted=0, returned=0, trained=0, version=0, surplus=limits.surplus) == 5


def test_synchronous_window_is_one_batch() -> None:
    assert FlowLimits(batch_groups=8, max_staleness=0, total_steps=1).window == 8


def test_a_batch_waits_for_a_group_that_is_due_now() -> None:
    live = [candidate(0, 5, ready=False), candidate(1, 6), candidate(2, 6)]
    assert choose_batch(B2_ETA1, 5, live) is None
    assert choose_batch(B2_ETA1, 4, live) == [1, 2]


def test_a_batch_waits_if_the_next_one_could_not_hold_all_that_is_due() -> None:
    # η = 2: six groups are under way. Three unready ones fall due at v6, whose batch holds two: one must be in now.
    limits = FlowLimits(batch_groups=2, max_staleness=2, total_steps=10)
    unready = [candidate(0, 6, ready=False), candidate(1, 6, ready=False), candidate(2, 6, ready=False)]
    ready = [candidate(3, 7), candidate(4, 7), candidate(5, 7)]
    assert choose_batch(limits, 5, unready + ready) is None
    one_more_ready = [candidate(0, 6), *unready[1:], *ready]
    assert choose_batch(limits, 5, one_more_ready) == [0, 3]


def test_a_batch_takes_earliest_deadline_then_admission_order() -> None:
    live = [candidate(0, 7), candidate(1, 6), candidate(2, 7), candidate(3, 6)]
    assert choose_batch(FlowLimits(3, 1, 10), 6, live) == [1, 3, 0]


def test_too_few_ready_groups_make_no_batch() -> None:
    assert choose_batch(B2_ETA1, 0, [candidate(0, 1)]) is None


def test_on_policy_means_everything_live_is_in_the_batch() -> None:
    limits = FlowLimits(batch_groups=2, max_staleness=0, total_steps=3)
    assert choose_batch(limits, 1, [candidate(0, 1), candidate(1, 1)]) == [0, 1]
    assert not is_feasible(limits, 1, [1])
