"""Rules of the flow: retry limits, requeues, small groups, filters, admission hooks, and ignored reports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from penstock.dataflow.errors import FailureKind, PenstockError, TrajectoryError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ledger import GroupState, JournalEntry, LedgerEvent, Reason
from penstock.dataflow.ports import Score
from penstock.dataflow.staleness import ExpiryPolicy
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import LengthLimits, TaskStream
from penstock.dataflow.trajectory import GroupRef, Trajectory
from penstock.platform.config.schema import DataflowConfig, FilterConfig
from penstock.platform.metrics.anomalies import Anomalies
from penstock.platform.run import flow as shipping
from penstock.platform.run.flow import Flow
from penstock.platform.run.flow_builder import make_filters
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow, next_groups, tasks, train_all

LONG_TAIL = [2, 3, 2, 40, 2, 3, 2, 2]


def failing_first(*kinds: FailureKind) -> FakeRewards:
    """Each trajectory fails in these ways, one attempt after another, before it is scored."""
    scripts: dict[str, Iterator[FailureKind]] = {}

    def score(trajectory: Trajectory) -> float | TrajectoryError:
        kind = next(scripts.setdefault(trajectory.trajectory_id, iter(kinds)), None)
        return 1.0 if kind is None else TrajectoryError(kind, "planted")

    return FakeRewards(score)


async def test_a_trajectory_may_use_up_the_budget_of_each_kind() -> None:
    flow = make_flow(
        engines := [FakeEngine()], failing_first("engine", "reward", "engine"), steps=1, retries=1, engine_retries=2
    )
    trained = await train_all(flow, engines)
    members = 2 * flow.counts().admitted
    assert len(trained) == flow.counts().admitted == 2
    assert flow.core.retries == {"engine": 2 * members, "reward": members}


@pytest.mark.parametrize(("kinds", "reason"), [(("reward",) * 2, Reason.REWARD), (("engine",) * 3, Reason.ENGINE)])
async def test_one_failure_beyond_the_budget_of_its_kind_fails_the_group(
    kinds: tuple[FailureKind, ...], reason: Reason
) -> None:
    flow = make_flow([FakeEngine()], failing_first(*kinds), steps=1, retries=1, engine_retries=2)
    async with flow:
        with pytest.raises(Exception, match="8 groups in a row failed"):
            await next_groups(flow)
    assert flow.core.ledger.reasons[GroupState.FAILED, reason] == flow.counts().failed >= 8


@pytest.mark.parametrize("max_requeues", [0, 1])
async def test_a_late_task_starts_again_no_more_often_than_it_may(max_requeues: int) -> None:
    engines = [FakeEngine(length=lambda serial: LONG_TAIL[serial % len(LONG_TAIL)])]
    flow = make_flow(engines, FakeRewards(), steps=20, on_expiry=ExpiryPolicy.DROP, max_requeues=max_requeues)
    starts: Counter[str] = Counter()
    flow.core.ledger.listeners = (lambda event: starts.update(started_task(event)),)
    await train_all(flow, engines)
    assert flow.core.ledger.reasons[GroupState.DROPPED, Reason.STALE] > 0
    assert max(starts.values()) == 1 + max_requeues


def started_task(event: JournalEntry) -> list[str]:
    is_start = isinstance(event, LedgerEvent) and event.state is GroupState.GENERATING
    return [event.task_id] if is_start else []  # type: ignore[union-attr]


async def test_the_survivors_of_a_group_train_if_they_are_enough() -> None:
    flow = make_flow(engines := [FakeEngine()], unlucky(members={2}), group_size=3, steps=3, retries=0)
    trained = await train_all(flow, engines)
    assert {len(group.rewards) for group in trained} == {2}
    assert flow.counts().failed == 0


async def test_a_group_with_too_few_survivors_fails() -> None:
    rewards = unlucky(members={1, 2}, groups=2)
    flow = make_flow(engines := [FakeEngine()], rewards, group_size=3, steps=3, retries=0)
    trained = await train_all(flow, engines)
    assert flow.core.ledger.reasons[GroupState.FAILED, Reason.REWARD] == flow.counts().failed == 2
    assert {len(group.rewards) for group in trained} == {3}


def without_opinion(members: set[int], groups: int = 1_000_000, others: float | TrajectoryError = 1.0) -> FakeRewards:
    """The reward has no opinion on these members of the first groups; the first of the others gets `others` there."""

    def score(trajectory: Trajectory) -> float | TrajectoryError | None:
        group, member = map(int, trajectory.trajectory_id.split("/"))
        if group >= groups:
            return 1.0
        return None if member in members else others if member == 0 else 1.0

    return FakeRewards(score)


async def test_members_without_an_opinion_of_the_reward_are_left_out_and_are_no_failures() -> None:
    rewards = without_opinion({1})
    flow = make_flow(engines := [FakeEngine()], rewards, group_size=3, steps=3, retries=2)
    notes: list[str] = []
    flow.stats.anomalies = Anomalies(notes.append)
    trained = await train_all(flow, engines)
    assert {tuple(one.trajectory_id[-1] for one in group.handle.trajectories) for group in trained} == {("0", "2")}
    assert {len(group.rewards) for group in trained} == {len(group.spans) for group in trained} == {2}
    counts = flow.counts()
    assert (counts.failed, counts.filtered, flow.core.retries.total()) == (0, 0, 0)
    assert rewards.calls == 3 * counts.admitted, "None is not asked for again"
    assert flow.stats.num_abstained == counts.admitted
    assert len(notes) == 1
    assert "no opinion (None) on an answer to t0" in notes[0]


@pytest.mark.parametrize(("least", "members"), [(2, {0, 1}), (2, {0, 1, 2}), (3, {1}), (1, {0, 1, 2})])
async def test_a_group_with_too_few_opinions_is_filtered_and_replaced(least: int, members: set[int]) -> None:
    rewards = without_opinion(members, groups=2)
    scored: list[int] = []

    class Listening:
        def group_size(self, _task: Task, _stream: str) -> int:
            return 3

        def group_scored(self, _task: Task, _stream: str, members: Sequence[Trajectory]) -> None:
            scored.append(len(members))

    sizes = {"group_size": 3, "min_group_size": least}
    flow = make_flow(engines := [FakeEngine()], rewards, **sizes, sizing=Listening(), steps=3, retries=0)
    trained = await train_all(flow, engines)
    counts = flow.counts()
    assert flow.core.ledger.reasons == {(GroupState.FILTERED, Reason.ABSTAINED): 2}
    assert (counts.admitted, counts.filtered, counts.trained, len(trained)) == (8, 2, 6, 6)
    assert flow.core.free_credits == 0
    assert set(scored) == {3}, "difficulty and curricula see groups with rewards only"


@pytest.mark.parametrize("size", [1, 3])
async def test_one_opinion_is_enough_where_one_member_is(size: int) -> None:
    rewards = without_opinion(set(range(1, size)))
    trained = await train_all(make_flow(engines := [FakeEngine()], rewards, group_size=size, min_group_size=1), engines)
    assert {group.rewards for group in trained} == {(1.0,)}


@pytest.mark.parametrize(
    ("size", "end"), [(2, (GroupState.FAILED, Reason.REWARD)), (3, (GroupState.FILTERED, Reason.ABSTAINED))]
)
async def test_a_group_fails_only_if_its_failures_leave_too_few_answers(
    size: int, end: tuple[GroupState, Reason]
) -> None:
    rewards = without_opinion({1}, groups=1, others=TrajectoryError("reward", "planted"))
    await train_all(flow := make_flow(engines := [FakeEngine()], rewards, group_size=size, retries=0), engines)
    assert flow.core.ledger.reasons == {end: 1}


async def test_a_reward_that_never_has_an_opinion_ends_the_run_with_the_reason() -> None:
    flow = make_flow([FakeEngine()], FakeRewards(lambda _: None), max_refills=5)
    async with flow:
        with pytest.raises(PenstockError, match=r"6 groups were filtered .* because the reward had an opinion on"):
            await next_groups(flow)


STOPPED_BY: dict[str, tuple[float | TrajectoryError | None, str]] = {
    "filtered groups": (None, r"6 groups were filtered"),
    "failed groups": (TrajectoryError("reward", "the judge is down"), r"8 groups in a row failed"),
}


@pytest.mark.parametrize("cause", STOPPED_BY)
async def test_a_resume_counts_filtered_and_failed_groups_in_a_row_from_0(cause: str) -> None:
    planted, message = STOPPED_BY[cause]
    stopped = make_flow([FakeEngine()], FakeRewards(lambda _: planted), max_refills=5, retries=0)
    with pytest.raises(PenstockError, match=message):
        async with stopped:
            await next_groups(stopped)
    saved = stopped.last_snapshot
    assert saved is not None

    is_first = iter([True])
    mended = FakeRewards(lambda _: planted if next(is_first, False) else 1.0)
    flow = make_flow(engines := [FakeEngine()], mended, max_refills=5, retries=0)
    await flow.restore(saved, {})
    assert len(await train_all(flow, engines)) == 8


def unlucky(members: set[int], groups: int = 1_000_000) -> FakeRewards:
    """These members of the first groups are never scored."""

    def score(trajectory: Trajectory) -> float | TrajectoryError:
        group, member = map(int, trajectory.trajectory_id.split("/"))
        return TrajectoryError("reward", "planted") if member in members and group < groups else 1.0

    return FakeRewards(score)


class AtMostEight:
    def max_new_tokens(self, task: Task, stream: str) -> int:
        return 8


async def test_under_other_bounds_tasks_start_again_with_their_limits_and_are_not_charged() -> None:
    long_last = FakeEngine(length=lambda serial: 2 if serial < 6 else 8)
    saved_flow = make_flow([long_last], FakeRewards(), eta=1, lengths=LengthLimits(5000, AtMostEight()))
    async with saved_flow:
        while saved_flow.core.num_ready < 3:  # noqa: ASYNC110 - the core has no event for it
            await asyncio.sleep(0)
        saved = saved_flow.snapshot()
        payloads = {group.group_id: await saved_flow.ports.store.get(group.handle) for group in saved.ready}
    assert len(saved.ready) == 3
    assert len(saved.open_groups) == 1

    flow = make_flow(engines := [FakeEngine()], FakeRewards(), eta=0)
    await flow.restore(saved, payloads)
    events: list[JournalEntry] = []
    flow.core.ledger.listeners = (events.append,)
    await train_all(flow, engines)
    assert flow.core.ledger.reasons == {(GroupState.DROPPED, Reason.ROLLBACK): 4}
    starts = [one for one in events if isinstance(one, LedgerEvent) and one.state is GroupState.GENERATING]
    assert [one.task_id for one in starts] == ["t4", "t5", "t0", "t1", "t2", "t3", "t6", "t7"], "each task once"
    assert {one.requeues for one in starts} == {0}
    assert flow.stats._candidates == {}, "nothing is kept of the groups before"
    began_again = {one.group_id for one in starts if one.task_id < "t4"}
    for request in engines[0].requests:
        is_again = int(request.request_id.partition("/")[0]) in began_again
        assert request.sampling.max_new_tokens == (8 if is_again else 5000), request.request_id


def one_long(members: Sequence[Trajectory]) -> bool:
    """What the user wants to train."""
    return any(member.num_sampled_tokens > 4 for member in members)


def none_cut(members: Sequence[Trajectory]) -> bool:
    return all(member.finish_reason != "length" for member in members)


def filtered_by(filters: FilterConfig) -> DataflowConfig:
    return DataflowConfig(batch_groups=2, group_size=2, max_staleness=1, filters=filters)


@pytest.mark.parametrize(
    ("config", "reason", "is_kept"),
    [
        (FilterConfig(max_overlong_share=0.4), Reason.OVERLONG, none_cut),
        (FilterConfig(user=f"{__name__}:one_long"), Reason.USER, one_long),
    ],
    ids=["overlong", "user"],
)
async def test_each_filter_takes_its_groups_out_and_they_are_replaced(
    config: FilterConfig, reason: Reason, is_kept: Callable[[Sequence[Trajectory]], bool]
) -> None:
    engines = [FakeEngine(length=lambda serial: 9 if serial % 5 == 0 else 3)]
    filters = make_filters(filtered_by(config)).filters
    lengths = LengthLimits(5000, AtMostEight())
    flow = make_flow(engines, FakeRewards(), steps=8, filters=filters, lengths=lengths)
    trained = await train_all(flow, engines)
    assert len(trained) == 16
    assert flow.core.ledger.reasons[GroupState.FILTERED, reason] == flow.counts().filtered > 0
    assert all(is_kept(group.handle.trajectories) for group in trained)


class PartsOf(FakeRewards):
    """Every answer's reward has the part `correct`, but for these calls."""

    def __init__(self, lacks: Callable[[int], bool]) -> None:
        super().__init__()
        self.lacks = lacks

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        self.calls += 1
        reward = float(self.calls % 2)
        return Score(reward, {"form": 1.0} if self.lacks(self.calls) else {"correct": reward})


NEEDS_A_PART = {
    "dataflow.filters.zero_variance_part": (FilterConfig(zero_variance=True, zero_variance_part="correct"), []),
    "algorithm.reward_weights": (FilterConfig(), ["correct"]),
}


@pytest.mark.parametrize("key", NEEDS_A_PART)
async def test_an_answer_whose_reward_lacks_a_part_that_is_needed_costs_its_group_and_not_the_run(key: str) -> None:
    rewards = PartsOf(lacks=lambda call: call == 9)
    config, weighed = NEEDS_A_PART[key]
    filters = make_filters(filtered_by(config), weighed).filters
    flow = make_flow(engines := [FakeEngine()], rewards, filters=filters)
    trained = await train_all(flow, engines)
    assert len(trained) == 8, "every batch was complete"
    assert flow.core.ledger.reasons[GroupState.FAILED, Reason.REWARD] == flow.counts().failed == 1


@pytest.mark.parametrize("key", NEEDS_A_PART)
async def test_a_part_that_no_reward_has_stops_the_run_with_its_name(key: str) -> None:
    config, weighed = NEEDS_A_PART[key]
    filters = make_filters(filtered_by(config), weighed).filters
    flow = make_flow([FakeEngine()], PartsOf(lacks=lambda _call: True), filters=filters)
    async with flow:
        with pytest.raises(PenstockError, match=rf"8 groups in a row failed.*{key} asks for correct.*It has: form"):
            await next_groups(flow)


class EvenTasksGetTwo:
    def group_size(self, task: Task, stream: str) -> int:
        return 2 if int(task.task_id[1:]) % 2 == 0 else 3


async def test_group_sizes_are_decided_at_admission() -> None:
    flow = make_flow(engines := [FakeEngine()], FakeRewards(), group_size=3, steps=4, sizing=EvenTasksGetTwo())
    admitted: dict[str, int] = {}
    flow.core.ledger.listeners = (lambda event: admitted.update(admitted_size(event)),)
    trained = await train_all(flow, engines)
    sizes = {group.task_id: len(group.rewards) for group in trained}
    assert sizes == admitted == {f"t{number}": 2 + number % 2 for number in range(8)}


def admitted_size(event: JournalEntry) -> dict[str, int]:
    return {event.task_id: event.group_size} if isinstance(event, LedgerEvent) else {}


class HardFromTheSecondVersionOn:
    """Records its calls."""

    def __init__(self) -> None:
        self.rewards: dict[int, Mapping[str, Sequence[float]]] = {}

    def weights(self, version: int, rewards: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        self.rewards[version] = rewards
        return {"easy": 1.0} if version < 2 else {"hard": 1.0}


async def test_a_curriculum_decides_what_is_admitted_after_each_publish() -> None:
    streams = [TaskStream("easy", tasks("easy")), TaskStream("hard", tasks("hard"), weight=0.0)]
    curriculum = HardFromTheSecondVersionOn()
    rewards = FakeRewards(lambda trajectory: 0.25 if trajectory.task_id.startswith("easy") else 0.75)
    flow = make_flow(engines := [FakeEngine()], rewards, eta=0, steps=4, streams=streams, curriculum=curriculum)
    trained = await train_all(flow, engines)
    assert [group.task_id[:4] for group in trained] == ["easy"] * 4 + ["hard"] * 4
    assert list(curriculum.rewards) == [1, 2, 3, 4]
    assert curriculum.rewards[3] == {"easy": (0.25,) * 4, "hard": (0.75,) * 2}


async def test_live_groups_never_take_more_than_their_capacity() -> None:
    flow = make_flow(engines := [FakeEngine()], FakeRewards(), batch=2, eta=4, steps=6, max_live=5)
    most: list[int] = []
    flow.core.ledger.listeners = (lambda _event: most.append(flow.core.ledger.live_trajectories),)
    await train_all(flow, engines)
    assert max(most) == 4
    assert flow.counts().trained == 12


async def test_a_pool_that_reports_twice_or_out_of_order_is_counted_and_logged_and_nothing_trains_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = make_flow(engines := [FakeEngine()], FakeRewards(), steps=4)
    trained: list[int] = []
    async with flow:
        for version in range(1, 5):
            batch = await next_groups(flow)
            trained += [group.group_id for group in batch]
            report_again(flow, batch)
            flow.advance(version)
            engines[0].version = version
    assert len(set(trained)) == 8 == flow.counts().trained
    assert flow.core.ignored == {"repeated": 16, "unknown": 4}
    (said,) = [record.getMessage() for record in caplog.records if record.name == shipping.__name__]
    assert "5 reports were ignored, 5 since the last such message: 4 repeated, 1 unknown since the start" in said
    assert "group 1000 of 4 admitted" in said


def report_again(flow: Flow, batch: Sequence[GroupRef]) -> None:
    """Five reports that must change nothing."""
    for group in batch:
        assert not flow.core.ready(group)
        flow.core.generated(group.group_id)
    flow.core.record_version(GroupId(1000), 0, 0)


async def test_ignored_reports_are_logged_together(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "LOG_IGNORED_EVERY_S", 0.0)
    flow = make_flow([FakeEngine()], FakeRewards(), steps=2)
    async with flow:
        for version in (1, 2):
            report_again(flow, await next_groups(flow))
            flow.advance(version)
    said = [record.getMessage() for record in caplog.records if record.name == shipping.__name__]
    assert ["10 reports were ignored, 5 since" in line for line in said] == [False, True]
