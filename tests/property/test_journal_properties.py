"""A journal replayed to a version is the ledger as it was then; what is damaged is void, nothing is trained twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.errors import CheckpointError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.journal import decode, encode, resume
from penstock.dataflow.ledger import GroupState, JournalEntry, LedgerCounts, LedgerEvent, Reason, VersionMark
from penstock.dataflow.staleness import ExpiryPolicy
from tests.property.virtual_run import VirtualRun
from tests.tiers import examples


class JournalledRun(VirtualRun):
    """Remembers the journal, and the books at every version."""

    def __init__(self, seed: int) -> None:
        super().__init__(3, 1, 8, 1.5, 0.2, seed, ExpiryPolicy.DROP)
        self.journal: list[JournalEntry] = []
        self.books: dict[int, LedgerCounts] = {}
        self.core.ledger.on_event = self.write

    def write(self, entry: JournalEntry) -> None:
        self.journal.append(entry)
        if isinstance(entry, VersionMark):
            self.books[entry.version] = self.core.ledger.counts()


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32), version=st.integers(1, 8))
def test_a_replay_gives_the_books_of_that_version(seed: int, version: int) -> None:
    run = JournalledRun(seed)
    run.run(skip_rate=0.1)
    assert list(decode(map(encode, run.journal))) == run.journal
    then = run.books[version]
    assert resume(run.journal, version).ledger.counts() == replace(then, dropped=then.dropped + then.live, live=0)


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32), version=st.integers(0, 8))
def test_a_resumed_run_balances_and_trains_nothing_twice(seed: int, version: int) -> None:
    run = JournalledRun(seed)
    run.run(skip_rate=0.1)
    resumed = resume(run.journal, version)
    counts = resumed.ledger.counts()
    assert counts.live == 0
    assert resumed.ledger.reasons[GroupState.DROPPED, Reason.ROLLBACK] == len(resumed.restarts)

    core = Dataflow(run.core.limits, GroupRules(2, 2, 1), version, resumed.ledger)
    again = VirtualRun(3, 1, 8, 1.5, 0.2, seed + 1)
    again.core = core
    again.run(skip_rate=0.0)
    before = {entry.group_id for entry in _until(run.journal, version) if entry.state is GroupState.TRAINED}
    assert not before & set(again.trained)
    assert core.finish().trained == 3 * 8


@given(seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=examples(30), deadline=None)
def test_a_damaged_line_ends_the_journal(seed: int, data: st.DataObject) -> None:
    run = JournalledRun(seed)
    run.run(skip_rate=0.0)
    lines = [encode(entry) for entry in run.journal]
    index = data.draw(st.integers(0, len(lines) - 1))
    position = data.draw(st.integers(0, len(lines[index]) - 1))
    damaged = bytearray(lines[index])
    damaged[position] ^= 0x01
    assert list(decode([*lines[:index], bytes(damaged), *lines[index + 1 :]])) == run.journal[:index]
    assert list(decode([*lines[:index], lines[index][:position]])) == run.journal[:index]


def test_a_journal_that_ends_too_early_is_refused() -> None:
    with pytest.raises(CheckpointError, match="ends at v1, the checkpoint is of v2"):
        resume([VersionMark(1)], 2)


def test_a_journal_with_a_gap_is_refused() -> None:
    late = LedgerEvent(GroupId(3), GroupState.GENERATING, "t", "", 2)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="admits group 3 where 0 is next"):
        resume([late, VersionMark(1)], 1)


def _until(journal: list[JournalEntry], version: int) -> list[LedgerEvent]:
    end = journal.index(VersionMark(version)) if version else 0
    return [entry for entry in journal[:end] if isinstance(entry, LedgerEvent)]
