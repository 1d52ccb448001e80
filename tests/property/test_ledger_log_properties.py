"""What was encoded is decoded; a damaged line ends the journal; a restored core continues as the saved one would."""

from __future__ import annotations

import copy
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataflow.core import Dataflow
from penstock.dataflow.ledger import JournalEntry, LedgerEvent
from penstock.dataflow.staleness import ExpiryPolicy
from penstock.platform.run.ledger_log import encode
from tests.ledger_logs import decode
from tests.property.virtual_run import VirtualRun
from tests.tiers import examples


class JournalledRun(VirtualRun):
    """Remembers the journal, and restores its core from a saved state when it reaches version `saved_at`."""

    def __init__(self, seed: int, saved_at: int = -1, policy: ExpiryPolicy = ExpiryPolicy.DROP) -> None:
        super().__init__(3, 1, 8, 1.5, 0.2, seed, policy)
        self.journal: list[JournalEntry] = []
        self.saved_at = saved_at
        self.core.ledger.listeners = (self.journal.append,)

    def check(self) -> None:
        super().check()
        if self.core.version != self.saved_at:
            return
        self.saved_at = -1
        saved, state = self.core, json.loads(json.dumps(self.core.state_dict()))
        self.core = Dataflow(saved.limits, saved.rules)
        ready = {record.group_id: record.ready for record in saved.ledger.live() if record.ready is not None}
        self.core.load_state_dict(state, copy.deepcopy(ready))
        self.core.ledger.listeners = (self.journal.append,)
        assert self.core.state_dict() == saved.state_dict()


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32), version=st.integers(0, 7), policy=st.sampled_from(ExpiryPolicy))
def test_a_restored_core_decides_what_the_saved_one_would_have(seed: int, version: int, policy: ExpiryPolicy) -> None:
    uninterrupted, restored = JournalledRun(seed, policy=policy), JournalledRun(seed, version, policy)
    for run in (uninterrupted, restored):
        run.run(skip_rate=0.1)
    assert restored.saved_at == -1, "it was restored"
    assert restored.trained == uninterrupted.trained
    assert restored.core.finish() == uninterrupted.core.finish()


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_journal_is_decoded_as_it_was_encoded(seed: int) -> None:
    run = JournalledRun(seed)
    run.run(skip_rate=0.1)
    assert list(decode(map(encode, run.journal))) == run.journal
    of_rest = [entry for entry in decode(map(encode, run.journal[40:])) if isinstance(entry, LedgerEvent)]
    expected = [entry for entry in run.journal[40:] if isinstance(entry, LedgerEvent)]
    assert [(one.group_id, one.state, one.reason) for one in of_rest] == [
        (one.group_id, one.state, one.reason) for one in expected
    ]


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
