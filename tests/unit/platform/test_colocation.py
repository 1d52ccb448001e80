"""Time-shared devices: an engine that fails to sleep or wake up is fenced, and the step continues without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import StepReport, WrittenFile
from penstock.dataflow.trajectory import GroupRef, iterate_groups
from penstock.platform.run.colocation import TimeSharedTrainer
from penstock.rollout.pool.pool import EnginePool


@dataclass
class Sleepy:
    """An engine that sleeps and wakes, or is lost in the attempt."""

    name: str
    calls: list[str]
    lost_at: str = ""
    version: int = 0
    engine_id: EngineId = field(init=False)

    def __post_init__(self) -> None:
        self.engine_id = EngineId(self.name)

    async def sleep(self) -> None:
        await self._switch("sleep")

    async def wake(self) -> None:
        await self._switch("wake")

    async def _switch(self, what: str) -> None:
        if self.lost_at == what:
            raise EngineLostError.final(f"{self.name}: {what}: no answer within 300 s.")
        self.calls.append(f"{self.name} {what}")


@dataclass
class Trainer:
    calls: list[str]

    async def step(self, batch: AsyncIterator[GroupRef]) -> StepReport:
        assert [group async for group in batch] == []
        self.calls.append("step")
        return StepReport(1, False, {}, 1.0)

    async def save(self, path: str) -> None: ...

    async def snapshot(self) -> float:
        self.calls.append("snapshot")
        return 2.0

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        self.calls.append(folder)
        return [WrittenFile("file", 3, 4)]


async def turn_of(pool: EnginePool, calls: list[str]) -> list[str]:
    """What happened in one step."""
    calls.clear()
    await asyncio.wait_for(TimeSharedTrainer(Trainer(calls), pool).step(iterate_groups([])), 5.0)
    return calls


async def test_a_fenced_engine_is_left_alone_and_one_that_joined_takes_its_turn() -> None:
    calls: list[str] = []
    pool = EnginePool([Sleepy("a", calls), Sleepy("b", calls, lost_at="sleep")], 4)  # type: ignore[list-item]
    pool.fence(EngineId("b"), "it died")
    pool.add(Sleepy("c", calls))  # type: ignore[arg-type]
    assert await turn_of(pool, calls) == ["a sleep", "c sleep", "step", "a wake", "c wake"]


async def test_an_engine_that_does_not_go_to_sleep_or_wake_up_is_fenced_off_and_the_step_is_taken() -> None:
    calls: list[str] = []
    engines = [Sleepy("a", calls), Sleepy("b", calls, lost_at="sleep"), Sleepy("c", calls, lost_at="wake")]
    pool = EnginePool(engines, 4)  # type: ignore[arg-type]
    assert await turn_of(pool, calls) == ["a sleep", "c sleep", "step", "a wake"]
    assert {name: "no answer" in why for name, why in pool.fenced.items()} == {"b": True, "c": True}


async def test_the_step_waits_for_work_that_is_in_use_of_the_engines_though_no_request_runs() -> None:
    calls: list[str] = []
    pool = EnginePool([Sleepy("a", calls)], 4)  # type: ignore[list-item]
    with pool.in_use():
        async with pool.lease():
            pass
        step = asyncio.create_task(turn_of(pool, calls))
        await asyncio.sleep(0.01)
        assert calls == [], "the lease has ended, the work has not"
    assert await step == ["a sleep", "step", "a wake"]


async def test_a_checkpoint_needs_no_turn_of_the_engines() -> None:
    calls: list[str] = []
    trainer = TimeSharedTrainer(Trainer(calls), EnginePool([Sleepy("a", calls)], 4))  # type: ignore[list-item]
    assert await trainer.snapshot() == 2.0
    assert await trainer.write_checkpoint("folder") == [WrittenFile("file", 3, 4)]
    assert calls == ["snapshot", "folder"]
