"""A group is in one state, ends once, and the ledger always balances."""

from __future__ import annotations

import pytest

from penstock.dataflow.errors import AccountingError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupState, Ledger, LedgerCounts, Reason


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_the_main_path_ends_in_trained_once(ledger: Ledger) -> None:
    group = ledger.admit(TaskId("t"), 2).group_id
    for state in (GroupState.SCORING, GroupState.READY, GroupState.TRAINING, GroupState.TRAINED):
        ledger.move(group, state)
    assert ledger.counts() == LedgerCounts(admitted=1, trained=1, dropped=0, filtered=0, failed=0, live=0)
    with pytest.raises(AccountingError, match="group 0 has already ended"):
        ledger.move(group, GroupState.TRAINED)


def test_a_state_cannot_be_skipped(ledger: Ledger) -> None:
    group = ledger.admit(TaskId("t"), 2).group_id
    with pytest.raises(AccountingError, match="cannot go from generating to training"):
        ledger.move(group, GroupState.TRAINING)


def test_an_unknown_group_is_refused(ledger: Ledger) -> None:
    with pytest.raises(AccountingError, match="group 3 was never admitted; 0 were admitted"):
        ledger.move(GroupId(3), GroupState.SCORING)


def test_a_reason_must_fit_its_end(ledger: Ledger) -> None:
    group = ledger.admit(TaskId("t"), 2).group_id
    with pytest.raises(AccountingError, match="cannot end as dropped\\(reward\\)"):
        ledger.end(group, GroupState.DROPPED, Reason.REWARD)


def test_untrained_ends_are_counted_by_reason(ledger: Ledger) -> None:
    for state, reason in (
        (GroupState.DROPPED, Reason.RUN_END),
        (GroupState.FILTERED, Reason.USER),
        (GroupState.FAILED, Reason.ENGINE),
    ):
        ledger.end(ledger.admit(TaskId("t"), 2).group_id, state, reason)
    ledger.admit(TaskId("t"), 2)
    assert ledger.counts() == LedgerCounts(admitted=4, trained=0, dropped=1, filtered=1, failed=1, live=1)
    assert ledger.counts().returned == 3
    assert ledger.reasons[GroupState.FAILED, Reason.ENGINE] == 1


def test_records_of_ended_groups_are_let_go(ledger: Ledger) -> None:
    for _ in range(100):
        ledger.end(ledger.admit(TaskId("t"), 2).group_id, GroupState.DROPPED, Reason.STALE)
    assert list(ledger.live()) == []
