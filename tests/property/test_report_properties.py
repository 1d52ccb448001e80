"""Any order of reports, true, late, repeated or about unknown groups: the core agrees with a simple model of it."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupState, Reason
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits
from penstock.dataflow.trajectory import GroupRef
from penstock.dataflow.versions import Span
from tests.tiers import examples

MEMBERS = 2
BEFORE_READY = (GroupState.GENERATING, GroupState.SCORING)
BACK = st.integers(-2, 8)
"""Which group a report is about, counted back from the newest: live, ended, or never admitted."""


class Reports(RuleBasedStateMachine):
    """Each rule makes one report, whether it is due or not, and books what has to come of it.

    Attributes:
        states: Where every group admitted is, or how it ended.
        since: Version at which each group's members were dispatched.
        ignored: How many reports had to change nothing.
    """

    @initialize(
        batch=st.integers(1, 3),
        eta=st.integers(0, 2),
        surplus=st.integers(0, 2),
        policy=st.sampled_from(ExpiryPolicy),
    )
    def begin(self, batch: int, eta: int, surplus: int, policy: ExpiryPolicy) -> None:
        surplus = surplus if policy is ExpiryPolicy.WAIT else 0
        self.core = Dataflow(FlowLimits(batch, eta, 1000, surplus, policy), GroupRules(MEMBERS, 2, 1))
        self.states: dict[int, GroupState] = {}
        self.since: dict[int, int] = {}
        self.trained: Counter[int] = Counter()
        self.ignored = 0

    @precondition(lambda self: self.core.free_credits > 0)
    @rule()
    def admit(self) -> None:
        group = self.core.admit(TaskId("t"))
        assert group == len(self.states)
        self.states[group] = GroupState.GENERATING
        self.since[group] = self.core.version
        for member in range(MEMBERS):
            self.core.record_version(group, member, self.core.version)

    @rule(back=BACK)
    def report_dispatched_again(self, back: int) -> None:
        number = len(self.states) - 1 - back
        self.expect(number, *BEFORE_READY)
        self.core.record_version(GroupId(number), 0, self.since.get(number, 0))

    @rule(back=BACK)
    def report_generated(self, back: int) -> None:
        self.generated(len(self.states) - 1 - back)

    @rule(back=BACK)
    def report_ready(self, back: int) -> None:
        self.ready(len(self.states) - 1 - back)

    @precondition(lambda self: any(state in BEFORE_READY for state in self.states.values()))
    @rule()
    def finish_the_oldest(self) -> None:
        number = min(number for number, state in self.states.items() if state in BEFORE_READY)
        if self.states[number] is GroupState.GENERATING:
            self.generated(number)
        self.ready(number)

    @rule(back=BACK)
    def report_failed(self, back: int) -> None:
        number = len(self.states) - 1 - back
        if self.expect(number, *BEFORE_READY, GroupState.READY):
            self.states[number] = GroupState.FAILED
        elif self.states.get(number) is GroupState.TRAINING:
            self.ignored -= 1
            return  # a driver reports no failure of what the trainer has
        self.core.end(GroupId(number), GroupState.FAILED, Reason.ENV)

    @rule(is_streamed=st.booleans())
    def close(self, is_streamed: bool) -> None:
        if self.core.in_training and not is_streamed:
            return
        before = len(self.core.in_training)
        if is_streamed:
            self.core.take_one()
        else:
            self.core.close_batch()
        self.take_cancelled()
        for group in self.core.in_training[before:]:
            assert self.states[group.group_id] is GroupState.READY
            assert 0 <= group.staleness(self.core.version) <= self.core.limits.max_staleness
            self.states[group.group_id] = GroupState.TRAINING

    @precondition(lambda self: self.core.is_batch_complete)
    @rule(is_skipped=st.booleans())
    def step(self, is_skipped: bool) -> None:
        batch = [group.group_id for group in self.core.in_training]
        if is_skipped:
            self.core.skip()
        else:
            self.core.advance(self.core.version + 1)
            self.trained.update(batch)
        for number in batch:
            self.states[number] = GroupState.DROPPED if is_skipped else GroupState.TRAINED
        self.take_cancelled()

    def generated(self, number: int) -> None:
        if self.expect(number, GroupState.GENERATING):
            self.states[number] = GroupState.SCORING
        self.core.generated(GroupId(number))

    def ready(self, number: int) -> None:
        is_due = self.expect(number, GroupState.SCORING)
        if is_due:
            self.states[number] = GroupState.READY
        spans = ((Span(self.since.get(number, 0), 2),),) * MEMBERS
        ref = GroupRef(GroupId(number), TaskId("t"), None, spans, (0.0, 1.0), 4)
        assert self.core.ready(ref) == is_due
        self.take_cancelled()

    @invariant()
    def the_counts_agree(self) -> None:
        booked, counts = Counter(self.states.values()), self.core.ledger.counts()
        assert counts.admitted == len(self.states)
        for state in (GroupState.TRAINED, GroupState.DROPPED, GroupState.FAILED):
            assert getattr(counts, state) == booked[state]
        assert counts.live == sum(booked[state] for state in (*BEFORE_READY, GroupState.READY, GroupState.TRAINING))
        assert {record.group_id: record.state for record in self.core.ledger.live()} == {
            number: state for number, state in self.states.items() if self.core.ledger.get(GroupId(number)) is not None
        }
        assert self.core.num_ready == booked[GroupState.READY]
        assert self.core.ignored.total() == self.ignored
        assert self.core.free_credits >= 0
        assert max(self.trained.values(), default=1) == 1

    def expect(self, number: int, *states: GroupState) -> bool:
        """Whether a report about this group counts; if not, it is booked as ignored."""
        is_due = self.states.get(number) in states
        self.ignored += not is_due
        return is_due

    def take_cancelled(self) -> None:
        for cancelled in self.core.take_cancelled():
            assert self.states[cancelled.group_id] in (*BEFORE_READY, GroupState.READY)
            self.states[cancelled.group_id] = GroupState.DROPPED


TestReports = Reports.TestCase
TestReports.settings = settings(max_examples=examples(80), stateful_step_count=60, deadline=None)
