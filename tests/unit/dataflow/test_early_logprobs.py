"""Which groups are selected for early logprobs, on the real core."""

from __future__ import annotations

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.early_logprobs import EarlyLogprobsQueue
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.trajectory import GroupRef
from penstock.dataflow.versions import Span

BATCH, STEPS = 2, 40


class Playground:
    """A core with eta = 3, and its queue."""

    def __init__(self) -> None:
        self.core = Dataflow(FlowLimits(BATCH, 3, STEPS), GroupRules(2, 2, 0))
        self.queue = EarlyLogprobsQueue(BATCH, self.core.find_ready)

    def ready(self, version: int) -> GroupId:
        """Admit a group, sampled at this version, and make it ready."""
        group_id = self.core.admit(TaskId("t"))
        for member in range(2):
            self.core.record_version(group_id, member, version)
        self.core.generated(group_id)
        group = GroupRef(group_id, TaskId("t"), "handle", ((Span(version, 4),),) * 2, (0.0, 1.0), 8)
        assert self.core.ready(group)
        self.queue.add(group)
        return group_id

    def handed_out(self) -> list[GroupId]:
        found = []
        while (group := self.queue.next()) is not None:
            found.append(group.group_id)
        return found

    def train(self) -> None:
        assert self.core.close_batch() is not None
        self.core.advance(self.core.version + 1)
        self.queue.begin_wait()


def test_due_first_then_admitted_first_and_no_more_than_a_batch() -> None:
    play = Playground()
    ids = [play.ready(0) for _ in range(4)]
    play.train()
    newer, older = play.ready(1), play.ready(0)
    assert (newer, older) == (4, 5)
    assert play.handed_out() == ids[2:], "those of the batch that closes next"


def test_an_older_group_that_comes_late_is_due_first() -> None:
    play = Playground()
    play.ready(0), play.ready(0)
    play.train()
    newer, older = play.ready(1), play.ready(0)
    assert play.handed_out() == [older, newer]


def test_no_group_is_chosen_twice_in_one_wait_and_every_group_may_be_in_the_next() -> None:
    play = Playground()
    first = play.ready(0)
    assert play.handed_out() == [first]
    assert play.handed_out() == []
    play.queue.begin_wait()
    assert play.handed_out() == [first]


def test_the_limit_is_per_wait_whichever_groups_came_meanwhile() -> None:
    play = Playground()
    play.ready(0), play.ready(0)
    assert len(play.handed_out()) == BATCH
    late = play.ready(0)
    assert play.handed_out() == []
    play.train()
    assert play.handed_out() == [late]


def test_who_ended_or_trains_is_not_handed_out() -> None:
    from penstock.dataflow.ledger import GroupState, Reason

    play = Playground()
    gone, kept = play.ready(0), play.ready(0)
    play.core.end(gone, GroupState.DROPPED, Reason.STALE)
    assert play.handed_out() == [kept]
    play.ready(0)
    assert play.core.close_batch() is not None
    play.queue.begin_wait()
    assert play.handed_out() == []


def test_a_trainer_that_never_waits_leaves_no_entries_behind() -> None:
    play = Playground()
    for version in range(STEPS):
        for _ in range(BATCH):
            play.ready(version)
        play.train()
        assert len(play.queue) == 0
