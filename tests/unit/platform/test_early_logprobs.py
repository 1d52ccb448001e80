"""Forwarding ready groups while the trainer waits, in the real flow over fake engines."""

from __future__ import annotations

import asyncio

import pytest

from penstock.dataflow.errors import PenstockError, TrainingError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupRef
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow, next_groups

BATCH = 4


class Ranks:
    """A trainer whose forwards wait for `pass_on`; it records what overlaps."""

    def __init__(self, *, is_free: bool = True, fails: bool = False) -> None:
        self.forwarded: list[GroupId] = []
        self.running = 0
        self.most_running = 0
        self.pass_on = asyncio.Event()
        self.fails = fails
        if is_free:
            self.pass_on.set()

    async def early_logprobs(self, group: GroupRef) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        if self.fails:
            raise TrainingError("planted")
        await self.pass_on.wait()
        self.running -= 1
        self.forwarded.append(group.group_id)


class SlowRewards(FakeRewards):
    """Scores a group only when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)

    async def score(self, task, trajectory):
        await self.permits.acquire()
        return await super().score(task, trajectory)

    def let(self, num_groups: int) -> None:
        for _ in range(2 * num_groups):
            self.permits.release()


def flow_with(ranks: Ranks, rewards: FakeRewards, engine: FakeEngine | None = None, **options):
    return make_flow([engine or FakeEngine()], rewards, batch=BATCH, eta=1, forward=ranks, **options)


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - of a flow that says nothing when a group becomes ready
            await asyncio.sleep(0.001)


async def test_ready_groups_are_forwarded_one_at_a_time_while_the_batch_is_awaited() -> None:
    ranks, rewards = Ranks(), SlowRewards()
    async with flow_with(ranks, rewards) as flow:
        waiting = asyncio.create_task(next_groups(flow))
        rewards.let(BATCH - 1)
        await until(lambda: len(ranks.forwarded) == BATCH - 1)
        assert not waiting.done()
        rewards.let(1)
        batch = await waiting
    assert {*ranks.forwarded} < {group.group_id for group in batch}
    assert ranks.most_running == 1
    assert len(ranks.forwarded) == BATCH - 1, "the group that completed the batch was not held up by its own forward"


async def test_a_batch_that_has_closed_waits_for_the_one_forward_under_way_and_no_other() -> None:
    ranks, rewards = Ranks(is_free=False), SlowRewards()
    async with flow_with(ranks, rewards) as flow:
        waiting = asyncio.create_task(next_groups(flow))
        rewards.let(BATCH - 1)
        await until(lambda: flow.core.num_ready == BATCH - 1)
        rewards.let(1)
        await until(lambda: len(flow.core.in_training) == BATCH)
        await asyncio.sleep(0.01)
        assert (ranks.running, waiting.done()) == (1, False)
        ranks.pass_on.set()
        await waiting
        await asyncio.sleep(0.01)
    assert len(ranks.forwarded) == 1


async def test_never_more_groups_than_a_batch_has() -> None:
    """A straggler holds the batch; by then more groups are ready than the batch takes."""
    ranks, rewards = Ranks(), FakeRewards()
    engine = FakeEngine(length=lambda serial: 3000 if serial < 2 else 3)
    flow = make_flow([engine], rewards, batch=BATCH, eta=0, surplus=3, steps=1, forward=ranks, timeout_s=20)
    async with flow:
        waiting = asyncio.create_task(next_groups(flow))
        await until(waiting.done)
    assert len(ranks.forwarded) <= BATCH
    assert ranks.most_running <= 1


async def test_nothing_is_forwarded_while_the_trainer_is_at_work() -> None:
    ranks, rewards, engine = Ranks(), SlowRewards(), FakeEngine()
    async with flow_with(ranks, rewards, engine) as flow:
        rewards.let(BATCH)
        await next_groups(flow)  # the trainer trains these
        before = len(ranks.forwarded)
        rewards.let(BATCH - 1)
        await until(lambda: flow.core.num_ready == BATCH - 1)
        await asyncio.sleep(0.01)
        assert len(ranks.forwarded) == before
        engine.version = 1
        flow.advance(1)
        waiting = asyncio.create_task(next_groups(flow))
        await until(lambda: len(ranks.forwarded) == before + BATCH - 1)
        rewards.let(1)
        await waiting


async def test_after_a_skipped_step_the_remaining_groups_are_forwarded_again() -> None:
    ranks, rewards = Ranks(), SlowRewards()
    async with flow_with(ranks, rewards) as flow:
        rewards.let(BATCH + 1)
        await until(lambda: flow.core.num_ready == BATCH + 1)
        await next_groups(flow)
        (left,) = (one for one in range(2 * BATCH) if flow.core.find_ready(GroupId(one)) is not None)
        for _ in range(2):
            ranks.forwarded.clear()
            flow.skip()
            waiting = asyncio.create_task(next_groups(flow))
            await until(lambda: ranks.forwarded)
            assert ranks.forwarded == [left]
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_a_rank_that_fails_ends_the_wait() -> None:
    ranks, rewards = Ranks(fails=True), SlowRewards()
    async with flow_with(ranks, rewards) as flow:
        rewards.let(1)
        with pytest.raises(TrainingError, match="planted"):
            async with asyncio.timeout(3):
                await next_groups(flow)


async def test_a_batch_that_never_closes_fails_as_without_early_logprobs() -> None:
    ranks, rewards = Ranks(), SlowRewards()
    async with flow_with(ranks, rewards, timeout_s=0.05) as flow:
        rewards.let(1)
        with pytest.raises(PenstockError, match="no token, score or ready group within"):
            await next_groups(flow)
