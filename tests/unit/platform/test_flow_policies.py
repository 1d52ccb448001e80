"""The flow under every expiry policy, with filters, redundant groups, task streams and streamed batches."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from penstock.dataflow.errors import PenstockError, TrainingError, TrajectoryError
from penstock.dataflow.filters import zero_variance
from penstock.dataflow.ledger import GroupState, LedgerCounts, Reason
from penstock.dataflow.staleness import ExpiryPolicy
from penstock.dataflow.task_queue import TaskStream
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.platform.run.flow import Flow, StopRequestedError
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow, next_groups, tasks, train_all

LONG_TAIL = [2, 3, 2, 40, 2, 3, 2, 2]


def long_tailed() -> FakeEngine:
    return FakeEngine(length=lambda serial: LONG_TAIL[serial % len(LONG_TAIL)])


@pytest.mark.parametrize("policy", list(ExpiryPolicy))
async def test_no_policy_trains_a_token_older_than_the_bound(policy: ExpiryPolicy) -> None:
    engines = [long_tailed()]
    flow = make_flow(engines, FakeRewards(), batch=2, eta=1, steps=20, on_expiry=policy)
    trained = await train_all(flow, engines)
    assert flow.stats.total.max_versions <= 1
    assert len({group.group_id for group in trained}) == 40
    assert flow.counts().is_balanced
    assert flow.counts().live == 0


async def test_waiting_gives_nothing_up() -> None:
    engines = [long_tailed()]
    flow = make_flow(engines, FakeRewards(), batch=2, eta=1, steps=20)
    await train_all(flow, engines)
    assert flow.counts().admitted == flow.counts().trained
    assert flow.stats.trained.tokens == pytest.approx(flow.stats.population.tokens)


async def test_dropping_aborts_the_late_and_starts_their_tasks_again() -> None:
    engines = [long_tailed()]
    flow = make_flow(engines, FakeRewards(), batch=2, eta=1, steps=20, on_expiry=ExpiryPolicy.DROP)
    trained = await train_all(flow, engines)
    stale = flow.core.ledger.reasons[GroupState.DROPPED, Reason.STALE]
    assert stale > 0
    assert engines[0].aborted, "the engine is told to stop what can no longer train"
    assert flow.counts().admitted == flow.counts().trained + flow.counts().dropped
    assert len({group.task_id for group in trained}) == len(trained), "no task is trained twice"


async def test_trimming_takes_the_weight_of_old_tokens_only() -> None:
    engines = [long_tailed()]
    flow = make_flow(engines, FakeRewards(), batch=2, eta=1, steps=20, on_expiry=ExpiryPolicy.TRIM)
    trained = await train_all(flow, engines)
    trimmed = [group for group in trained if group.num_trimmed_tokens]
    assert trimmed, "the long tail outlives the bound"
    assert all(group.oldest_version < group.min_version for group in trimmed)
    assert flow.stats.total.trimmed_tokens == sum(group.num_trimmed_tokens for group in trimmed)


async def test_redundant_groups_do_not_hold_a_batch_open() -> None:
    engines = [FakeEngine(length=lambda serial: 4000 if serial == 0 else 3)]
    flow = make_flow(engines, FakeRewards(), batch=2, eta=0, steps=3, surplus=1)
    await train_all(flow, engines)
    assert flow.core.ledger.reasons[GroupState.DROPPED, Reason.REDUNDANT] >= 1
    assert flow.counts().trained == 6


async def test_filtered_groups_are_replaced_and_never_trained() -> None:
    equal = itertools.cycle([0.0, 0.0, 0.0, 1.0])
    engines = [FakeEngine()]
    flow = make_flow(engines, FakeRewards(lambda _t: next(equal)), steps=4, filters=[zero_variance()])
    trained = await train_all(flow, engines)
    assert all(len(set(group.rewards)) > 1 for group in trained)
    assert flow.core.ledger.reasons[GroupState.FILTERED, Reason.ZERO_VARIANCE] == flow.counts().filtered > 0


async def test_a_filter_that_lets_nothing_through_stops_the_run_by_name() -> None:
    flow = make_flow([FakeEngine()], FakeRewards(lambda _t: 0.0), filters=[zero_variance()], max_refills=10)
    async with flow:
        with pytest.raises(PenstockError, match=r"11 groups were filtered .* 11 of them by the filter zero_variance"):
            await next_groups(flow)


async def test_streams_are_mixed_by_weight() -> None:
    engines = [FakeEngine()]
    streams = [TaskStream("easy", tasks("easy"), weight=3.0), TaskStream("hard", tasks("hard"), weight=1.0)]
    flow = make_flow(engines, FakeRewards(), batch=4, eta=1, steps=10, streams=streams)
    trained = await train_all(flow, engines)
    assert sum(group.task_id.startswith("easy") for group in trained) == 30


async def test_a_batch_in_parts_is_sent_group_by_group() -> None:
    engines = [long_tailed()]
    flow = make_flow(engines, FakeRewards(), batch=3, eta=2, steps=10, streamed=True)
    trained = await train_all(flow, engines)
    assert len({group.group_id for group in trained}) == 30
    assert flow.stats.total.max_versions <= 2


async def test_parts_are_full_and_in_order_and_the_last_one_is_returned() -> None:
    flow = make_flow([long_tailed()], FakeRewards(), batch=8, eta=0, steps=1, streamed=True, tokens_per_part=100)
    parts = flow.ports.accumulate
    async with flow:
        last = await flow.next_batch()
        sent = [*parts.sent, last]
        assert [group.group_id for part in sent for group in part] == [one.group_id for one in flow.core.in_training]
        sizes = [[group.num_tokens for group in part] for part in sent]
        assert len(sizes) > 1, "else nothing was sent ahead"
        assert all(len(part) == 1 or sum(part) <= 100 for part in sizes)
        assert all(sum(part) + following[0] > 100 for part, following in itertools.pairwise(sizes))


async def test_a_trainer_that_fails_on_a_part_ends_the_wait_for_groups() -> None:
    engine = FakeEngine(length=lambda serial: 3 if serial < 4 else 10**9)
    flow = make_flow([engine], FakeRewards(), batch=3, eta=0, timeout_s=60.0, streamed=True)
    flow.ports.accumulate.fails = True
    async with asyncio.timeout(5):
        with pytest.raises(TrainingError, match="planted"):
            async with flow:
                await flow.next_batch()


async def test_a_batch_in_parts_that_never_closes_fails_as_a_whole_one() -> None:
    flow = make_flow([FakeEngine(silent=True)], FakeRewards(), batch=3, eta=0, timeout_s=0.2, streamed=True)
    with pytest.raises(PenstockError, match="batch_timeout_s"):
        async with flow:
            await flow.next_batch()


@pytest.mark.parametrize("is_told", [True, False], ids=["by a signal", "by max_hours"])
@pytest.mark.parametrize("tokens_per_part", [1, 1000], ids=["after a part", "before a part"])
async def test_the_groups_of_a_batch_in_parts_that_is_not_complete_are_ready_again(
    is_told: bool, tokens_per_part: int
) -> None:
    engine = FakeEngine(length=lambda serial: 3 if serial < 3 else 10**9)
    sizes = {"batch": 4, "group_size": 1, "tokens_per_part": tokens_per_part}
    flow = make_flow([engine], FakeRewards(), eta=0, streamed=True, **sizes)

    async def train_until_stopped() -> None:
        async with flow:
            waiting = asyncio.create_task(flow.next_batch())
            for _ in range(1000):  # turns of the event loop, until nothing but the long answer is left
                await asyncio.sleep(0)
            assert len(flow.core.in_training) == 3
            assert len(flow.ports.accumulate.sent) == (2 if tokens_per_part == 1 else 0)
            if is_told:
                answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                answer.set_result(False)  # of a trainer that computes nothing at this moment
                flow.stop(answer)
            else:
                flow.fail(StopRequestedError("the run was stopped at v0"))
            await waiting

    with pytest.raises(StopRequestedError):
        await train_until_stopped()
    saved = flow.last_snapshot
    assert saved is not None
    assert (len(saved.ready), len(saved.open_groups)) == (3, 1)
    assert flow.stats.total.tokens_by_staleness == {}


class FakeReference:
    """Remembers for each call how many groups were ready."""

    def __init__(self) -> None:
        self.num_ready: list[int] = []
        self.flow: Flow | None = None

    async def logprobs(self, handle: GroupPayload) -> str:
        assert self.flow is not None
        self.num_ready.append(self.flow.core.num_ready)
        await asyncio.sleep(0.001)
        return f"logprobs of {handle.group_id}"


async def test_reference_logprobs_are_fetched_for_each_group_before_its_batch_is_complete() -> None:
    engines, reference, teacher = [long_tailed()], FakeReference(), FakeReference()
    frozen = {"reference": reference, "teacher": teacher}
    flow = reference.flow = teacher.flow = make_flow(engines, FakeRewards(), batch=3, eta=2, steps=4, **frozen)
    async with flow:
        batch = await next_groups(flow)
    assert reference.num_ready[0] == 0, "asked before any group is ready, let alone the batch"
    assert all(group.reference == group.teacher == f"logprobs of {group.group_id}" for group in batch)
    assert len(teacher.num_ready) == len(reference.num_ready)


class FailingReference(FakeReference):
    """Raises `error` for the groups for which `fails` says so."""

    def __init__(self, error: Exception, fails: Callable[[GroupPayload], bool] = lambda _group: True) -> None:
        super().__init__()
        self.error = error
        self.fails = fails

    async def logprobs(self, handle: GroupPayload) -> str:
        if self.fails(handle):
            raise self.error
        return f"logprobs of {handle.group_id}"


async def test_a_reference_without_workers_stops_the_run() -> None:
    flow = make_flow([FakeEngine()], FakeRewards(), reference=FailingReference(PenstockError("no worker is left")))
    async with flow:
        with pytest.raises(PenstockError, match="no worker is left"):
            await next_groups(flow)


@pytest.mark.parametrize("role", ["reference", "teacher"])
async def test_a_group_whose_logprobs_cannot_be_computed_fails_with_its_cause_and_is_replaced(role: str) -> None:
    error = TrajectoryError("reward", f"{role}: planted")
    frozen = {role: FailingReference(error, lambda group: group.group_id == 1)}
    engines = [FakeEngine()]
    flow = make_flow(engines, FakeRewards(), batch=1, eta=0, steps=3, **frozen)
    trained = await train_all(flow, engines)
    assert 1 not in {group.group_id for group in trained}
    assert flow.counts() == LedgerCounts(admitted=4, trained=3, dropped=0, filtered=0, failed=1, live=0)
    assert flow.core.ledger.reasons[GroupState.FAILED, Reason.REWARD] == 1
    assert flow.stats.failures == [error]


async def test_a_reference_that_fails_for_every_group_stops_the_run_with_its_cause() -> None:
    reference = FailingReference(TrajectoryError("reward", "reference: planted"))
    flow = make_flow([FakeEngine()], FakeRewards(), reference=reference)
    async with flow:
        with pytest.raises(PenstockError, match=r"8 groups in a row failed.*reference: planted"):
            await asyncio.wait_for(next_groups(flow), 10.0)
    assert flow.counts().failed == 8


async def test_a_restored_group_whose_logprobs_cannot_be_computed_again_fails_alone() -> None:
    healthy = FailingReference(Exception(), lambda _group: False)
    flow = make_flow([FakeEngine()], FakeRewards(), batch=2, eta=1, reference=healthy)
    async with flow:
        while flow.core.num_ready < 3:  # noqa: ASYNC110 - the core has no event for it
            await asyncio.sleep(0)
        saved = flow.snapshot()
        payloads = {group.group_id: await flow.ports.store.get(group.handle) for group in saved.ready}
    error, lost = TrajectoryError("reward", "reference: planted"), saved.ready[0].group_id
    engines = [FakeEngine()]
    reference = FailingReference(error, lambda group: group.group_id == lost)
    resumed = make_flow(engines, FakeRewards(), batch=2, eta=1, reference=reference)
    await resumed.restore(saved, payloads)
    assert resumed.core.num_ready == len(saved.ready) - 1
    trained = await train_all(resumed, engines)
    assert lost not in {group.group_id for group in trained}
    assert (resumed.counts().trained, resumed.counts().failed) == (8, 1)
    assert resumed.stats.failures == [error]


async def test_a_failed_member_is_never_a_reward_of_zero() -> None:
    calls = itertools.count()

    def reward(_trajectory: Trajectory) -> float | TrajectoryError:
        return TrajectoryError("reward", "planted") if next(calls) % 5 == 0 else 1.0

    engines = [FakeEngine()]
    flow = make_flow(engines, FakeRewards(reward), steps=10, retries=0)
    trained = await train_all(flow, engines)
    assert all(reward == 1.0 for group in trained for reward in group.rewards)
    assert flow.counts().failed > 0


async def waits_for_an_engine(engine_retries: int) -> Flow:
    """Over an engine that is at the version in service somewhat later than requests may wait for it."""
    engine = FakeEngine()
    flow = make_flow([engine], FakeRewards(), engine_retries=engine_retries)
    pool = flow.ports.runner.pool
    pool.version_timeout_s = 0.05
    pool.set_min_version(1)

    def follow() -> None:
        engine.version = 1
        pool.refresh()

    asyncio.get_running_loop().call_later(0.07, follow)
    flow.core.version = 1
    return flow


async def test_a_trajectory_that_waited_too_long_for_a_slot_tries_again() -> None:
    flow = await waits_for_an_engine(engine_retries=9)
    async with flow:
        assert len(await next_groups(flow)) == 2
    assert flow.core.retries["engine"] > 0
    assert flow.counts().failed == 0


async def test_a_group_beyond_its_retries_for_a_slot_fails_with_its_reason_and_is_replaced() -> None:
    flow = await waits_for_an_engine(engine_retries=0)
    async with flow:
        assert len(await next_groups(flow)) == 2
    assert flow.core.ledger.reasons[GroupState.FAILED, Reason.ENGINE] == flow.counts().failed > 0
    assert "for an engine at v1 or newer" in str(flow.stats.failures[0])
