"""The incremental gate decides exactly as its definition (tests/staleness_definition.py) does over every live group."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.dataflow.gates import ConsumptionGate
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupRecord
from penstock.dataflow.staleness import FlowLimits
from tests.staleness_definition import Candidate, choose_batch
from tests.tiers import examples

B, ETA = 2, 2


class GateAgainstDefinition(RuleBasedStateMachine):
    """Random groups come, are dated, become ready, leave; versions pass."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = FlowLimits(B, ETA, 1000)
        self.gate = ConsumptionGate(self.limits)
        self.version = 0
        self.oldest: dict[GroupId, int | None] = {}
        self.records: dict[GroupId, GroupRecord] = {}
        self.is_ready: set[GroupId] = set()
        self.admitted = 0

    @rule()
    def admit(self) -> None:
        group = GroupId(self.admitted)
        self.admitted += 1
        self.records[group] = GroupRecord(group, TaskId("t"), 2)
        self.gate.add(self.records[group])
        self.oldest[group] = None

    @precondition(lambda self: self.oldest)
    @rule(data=st.data(), back=st.integers(0, ETA))
    def date(self, data: st.DataObject, back: int) -> None:
        group = data.draw(st.sampled_from(sorted(self.oldest)))
        if group not in self.is_ready:
            self.oldest[group] = max(0, self.version - back)
            self.gate.update_deadline(self.records[group], self.oldest[group])  # type: ignore[arg-type]

    @precondition(lambda self: any(v is not None for g, v in self.oldest.items() if g not in self.is_ready))
    @rule(data=st.data())
    def make_ready(self, data: st.DataObject) -> None:
        dated = sorted(g for g, v in self.oldest.items() if v is not None and g not in self.is_ready)
        group = data.draw(st.sampled_from(dated))
        self.is_ready.add(group)
        self.gate.mark_ready(self.records[group])

    @precondition(lambda self: self.oldest)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.forget(data.draw(st.sampled_from(sorted(self.oldest))))

    @rule()
    def close_or_wait(self) -> None:
        batch = self.by_definition()
        if batch is None:
            return
        assert self.gate.shortfall(self.version) == 0
        for expected in batch:
            taken = self.gate.next_ready()
            assert taken is self.records[expected]
            self.forget(expected)
        self.version += 1

    @invariant()
    def they_agree(self) -> None:
        assert (self.by_definition() is not None) == (self.gate.shortfall(self.version) == 0)
        assert self.gate.num_ready == len(self.is_ready)
        assert len(self.gate) == len(self.oldest)

    def by_definition(self) -> list[GroupId] | None:
        live = [
            Candidate(group, (self.version if oldest is None else oldest) + ETA, group in self.is_ready)
            for group, oldest in self.oldest.items()
        ]
        return choose_batch(self.limits, self.version, live)

    def forget(self, group: GroupId) -> None:
        self.gate.remove(self.records[group])
        del self.oldest[group]
        self.is_ready.discard(group)


TestGateAgainstDefinition = GateAgainstDefinition.TestCase
TestGateAgainstDefinition.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
