"""The dataflow core: ignored reports, retry limits, requeues, and the limit on live trajectories."""

from __future__ import annotations

import pytest

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.errors import AccountingError, StalenessError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupState, Reason
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits
from penstock.dataflow.trajectory import GroupRef
from penstock.dataflow.versions import Span


def core_of(*, batch: int = 1, eta: int = 1, **limits: object) -> Dataflow:
    return Dataflow(FlowLimits(batch, eta, 10, **limits), GroupRules(2, 2, 1))  # type: ignore[arg-type]


def started(core: Dataflow, requeues: int = 0) -> GroupId:
    """A group whose two members were dispatched at the published version."""
    group = core.admit(TaskId("t"), requeues=requeues)
    for member in range(2):
        core.record_version(group, member, core.version)
    return group


def sampled_at(group: GroupId, *versions: int) -> GroupRef:
    return GroupRef(group, TaskId("t"), None, tuple((Span(version, 3),) for version in versions), (0.0, 1.0), 8)


def made_ready(core: Dataflow, requeues: int = 0) -> GroupRef:
    ref = sampled_at(group := started(core, requeues), core.version, core.version)
    core.generated(group)
    assert core.ready(ref)
    return ref


def test_a_report_about_an_unknown_group_is_counted_and_changes_nothing() -> None:
    core = core_of()
    core.generated(GroupId(7))
    core.record_version(GroupId(7), 0, 0)
    assert not core.ready(sampled_at(GroupId(7), 0, 0))
    assert core.ignored == {"unknown": 3}
    assert core.newest_ignored == 7
    assert (core.ledger.counts().admitted, core.num_ready) == (0, 0)


def test_a_group_reported_out_of_order_is_not_ready() -> None:
    core = core_of()
    group = started(core)
    assert not core.ready(sampled_at(group, 0, 0))
    assert core.ignored == {"out_of_order": 1}
    assert core.close_batch() is None


def test_a_group_reported_twice_trains_once() -> None:
    core = core_of()
    ref = made_ready(core)
    assert not core.ready(ref)
    core.generated(ref.group_id)
    assert core.ignored == {"repeated": 2}
    assert core.close_batch() == (ref,)
    assert not core.ready(ref)
    core.advance(1)
    assert not core.ready(ref)
    assert core.ignored == {"repeated": 3, "ended": 1}
    assert core.close_batch() is None
    assert core.ledger.counts().trained == 1


def test_each_kind_of_failure_has_its_own_budget() -> None:
    core = Dataflow(FlowLimits(1, 1, 10), GroupRules(2, 2, max_retries=1, max_engine_retries=3))
    granted = {kind: [core.grant_retry(kind, n) for n in range(1, 5)] for kind in ("env", "reward", "engine")}
    assert granted == {
        "env": [True, False, False, False],
        "reward": [True, False, False, False],
        "engine": [True, True, True, False],
    }
    assert core.retries == {"env": 1, "reward": 1, "engine": 3}


@pytest.mark.parametrize(("requeues", "may_requeue"), [(0, True), (1, True), (2, False)])
def test_a_dropped_task_starts_again_so_many_times_and_no_more(requeues: int, may_requeue: bool) -> None:
    core = core_of(eta=1, on_expiry=ExpiryPolicy.DROP, max_requeues=2)
    late = started(core, requeues)
    for version in (1, 2):
        made_ready(core)
        core.close_batch()
        core.advance(version)
    assert core.take_cancelled() == [(late, may_requeue)]
    assert core.ledger.reasons[GroupState.DROPPED, Reason.STALE] == 1


def test_live_groups_never_take_more_than_their_capacity() -> None:
    core = core_of(batch=1, eta=9, max_live_trajectories=5)
    groups = [started(core) for _ in range(core.free_credits)]
    assert len(groups) == 2, "two groups of two within a limit of five"
    assert core.free_credits == 0
    with pytest.raises(AccountingError, match="no credit to admit"):
        core.admit(TaskId("t"))
    core.end(groups[0], GroupState.FAILED, Reason.ENV)
    assert core.free_credits == 1


def test_a_group_waits_until_it_is_dispatched_and_again_when_it_is_ready() -> None:
    core = core_of(batch=1, eta=9)
    first, second = core.admit(TaskId("t")), core.admit(TaskId("t"))
    assert core.free_credits == 0, "two wait for an engine, which are two batches"
    core.record_version(first, 0, core.version)
    assert core.free_credits == 1
    core.record_version(second, 0, core.version)
    assert core.free_credits == 2
    core.generated(first)
    assert core.free_credits == 2, "its scores are missing"
    core.ready(sampled_at(first, 0, 0))
    assert core.free_credits == 1
    assert core.close_batch() is not None
    assert core.free_credits == 2, "it trains"


def test_a_long_group_does_not_keep_others_from_starting() -> None:
    core = core_of(batch=1, eta=9)
    started(core)
    for version in range(1, 9):
        made_ready(core)
        assert core.close_batch() is not None
        core.advance(version)
        assert core.free_credits >= 1


def test_a_smaller_group_takes_less_capacity() -> None:
    core = Dataflow(FlowLimits(1, 9, 10, max_live_trajectories=8), GroupRules(4, 2, 1))
    core.admit(TaskId("t"), group_size=2)
    assert core.free_credits == 1, "six are left, a group may take four"


def test_a_group_that_is_too_old_is_never_handed_out() -> None:
    core = core_of(eta=1)
    ref = made_ready(core)
    core.version = 2
    with pytest.raises(StalenessError, match=rf"group {ref.group_id} would train at staleness 2, max_staleness is 1"):
        core.close_batch()


@pytest.mark.parametrize("versions", [(0, 0), (2, 3)], ids=["older than its dispatch", "not published"])
def test_versions_that_no_engine_can_have_served_stop_the_run(versions: tuple[int, int]) -> None:
    core = core_of(eta=9)
    core.version = 1
    group = started(core)
    core.generated(group)
    with pytest.raises(StalenessError, match=r"dispatched at v1 and v1 is published \(I8\)"):
        core.ready(sampled_at(group, *versions))
