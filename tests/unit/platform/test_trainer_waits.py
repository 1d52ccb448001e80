"""Why the trainer waited: too few ready groups, or a due group that is still generating or being scored."""

from __future__ import annotations

import asyncio

import pytest

from penstock.dataflow.core import Dataflow, GroupRules, WaitReason
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupState, Reason
from penstock.dataflow.ports import Score
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import GroupRef, Trajectory
from penstock.dataflow.versions import Span
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow, next_groups
from tests.virtual_time import run_virtual

WAITED_S = 0.1


def test_the_batch_waits_for_the_group_that_is_due_first() -> None:
    core = Dataflow(FlowLimits(1, 1, 10), GroupRules(2, 2, 1))
    late, early = (core.admit(TaskId("t")) for _ in range(2))
    assert core.wait_reason(1) == "too_few"
    for group in (late, early):
        core.record_version(group, 0, 0)
        core.record_version(group, 1, 0)
    make_ready(core, early)
    core.close_batch()
    core.advance(1)
    core.record_version(young := core.admit(TaskId("t")), 0, 1)
    make_ready(core, young)
    assert core.close_batch() is None
    assert core.wait_reason(1) == "generating"
    core.generated(late)
    assert core.wait_reason(1) == "scoring"
    assert core.wait_reason(2) == "too_few"


def test_once_the_awaited_group_has_ended_the_next_one_is_named() -> None:
    core = Dataflow(FlowLimits(1, 1, 10), GroupRules(1, 1, 1))
    for version in range(3):
        late, early = (core.admit(TaskId("t")) for _ in range(2))
        for group in (late, early):
            core.record_version(group, 0, core.version)
        make_ready(core, early)
        assert core.wait_reason(1) == "generating"
        core.generated(late)
        assert core.wait_reason(1) == "scoring"
        core.end(late, GroupState.FAILED, Reason.REWARD)
        assert core.wait_reason(1) == "too_few", "nothing is awaited"
        core.close_batch()
        core.advance(version + 1)


def make_ready(core: Dataflow, group: GroupId) -> None:
    core.generated(group)
    spans = ((Span(core.version, 1),),)
    assert core.ready(GroupRef(group, TaskId("t"), None, spans, (0.0,), 1))


class SlowFor(FakeRewards):
    """The first group's scores come late."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        await asyncio.sleep(WAITED_S if trajectory.trajectory_id.startswith("0/") else 0)
        return await super().score(task, trajectory)


class SlowTokens(FakeEngine):
    """The first group's answers come late."""

    async def generate(self, request):  # type: ignore[no-untyped-def]
        await asyncio.sleep(WAITED_S if request.request_id.startswith("0/") else 0)
        async for delta in super().generate(request):
            yield delta


@pytest.mark.parametrize(
    ("engine", "rewards", "options", "expected"),
    [
        (SlowTokens(), FakeRewards(), {"eta": 0}, "too_few"),
        (SlowTokens(), FakeRewards(), {"eta": 1}, "generating"),
        (FakeEngine(), SlowFor(), {"eta": 1}, "scoring"),
        (FakeEngine(), SlowFor(), {"batch": 3, "max_live": 8, "streamed": True}, "scoring"),  # one ready is enough,
    ],
    ids=["too few", "generating", "scoring", "scoring, streamed"],
)
def test_the_trainers_waiting_is_counted_by_what_it_waited_for(
    engine: FakeEngine, rewards: FakeRewards, options: dict[str, int], expected: WaitReason
) -> None:
    async def waited() -> dict[WaitReason, float]:
        flow = make_flow([engine], rewards, steps=4, **options)  # type: ignore[arg-type]
        async with flow:
            for version in range(1, 3):
                await next_groups(flow)
                engine.version = version
                flow.advance(version)
        return flow.stats.trainer_wait_for

    waited_s = run_virtual(waited())
    assert max(waited_s, key=waited_s.__getitem__) == expected, waited_s
    assert sum(waited_s.values()) >= WAITED_S / 2
