"""The wait for a batch ends when nothing progresses, however long the batch takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ports import GenerateRequest, Score, TokenDelta
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.run.flow import Flow
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow, next_groups
from tests.virtual_time import run_virtual

LIMIT_S = 80.0
"""Eight checks, one every 10 s."""


@dataclass
class Paced(FakeEngine):
    """Waits `token_s` before each token."""

    token_s: float = 0.0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        async for delta in FakeEngine.generate(self, request):
            await asyncio.sleep(self.token_s)
            yield delta


class OneAtATime(FakeRewards):
    """Takes `LIMIT_S` − 15 s for each score."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = asyncio.Lock()

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        async with self.is_free:
            await asyncio.sleep(LIMIT_S - 15)
            return await super().score(task, trajectory)


class Reference:
    """Takes `LIMIT_S` − 15 s for each group."""

    def __init__(self) -> None:
        self.is_free = asyncio.Lock()

    async def logprobs(self, handle: Any) -> Any:
        async with self.is_free:
            await asyncio.sleep(LIMIT_S - 15)
            return handle


def flow_of(engine: FakeEngine, rewards: FakeRewards | None = None, **settings: Any) -> Flow:
    rewards = rewards or FakeRewards(lambda _: 1.0)
    return make_flow([engine], rewards, batch=4, timeout_s=LIMIT_S, silence_s=10_000.0, **settings)


@pytest.mark.parametrize("progress", ["tokens", "scores", "ready groups"])
def test_a_batch_may_take_any_time_while_something_progresses(progress: str) -> None:
    async def first_batch() -> float:
        engine = Paced(length=lambda _: 6, token_s=LIMIT_S - 15 if progress == "tokens" else 0.0)
        rewards = OneAtATime() if progress == "scores" else None
        reference = Reference() if progress == "ready groups" else None
        async with flow_of(engine, rewards, reference=reference) as flow:
            assert len(await next_groups(flow)) == 4
        return asyncio.get_running_loop().time()

    assert run_virtual(first_batch()) > 3 * LIMIT_S


def test_a_batch_in_which_nothing_progresses_ends_the_run_in_time_and_lists_what_it_waits_for() -> None:
    async def stopped() -> float:
        async with flow_of(FakeEngine(silent=True)) as flow:
            with pytest.raises(PenstockError, match=r"no token, score or ready group within batch_timeout_s=80: 0 of"):
                await next_groups(flow)
        return asyncio.get_running_loop().time()

    assert run_virtual(stopped()) == LIMIT_S


def test_tokens_that_stop_in_the_middle_end_the_run_one_limit_later() -> None:
    async def stopped() -> float:
        engine = Paced(length=lambda _: 99, token_s=30.0)
        asyncio.get_running_loop().call_at(100.0, setattr, engine, "is_asleep", True)
        async with flow_of(engine) as flow:
            with pytest.raises(PenstockError, match="no token, score or ready group"):
                await next_groups(flow)
        return asyncio.get_running_loop().time()

    assert 90.0 + LIMIT_S <= run_virtual(stopped()) <= 120.0 + LIMIT_S + 10.0


async def test_a_driver_that_stood_still_finds_its_run_alive() -> None:
    flow = make_flow([Paced(token_s=0.02)], FakeRewards(lambda _: 1.0), timeout_s=0.4)
    async with flow:
        asyncio.get_running_loop().call_later(0.03, time.sleep, 0.8)
        assert len(await next_groups(flow)) == 2
