"""Trainer and engines on the same devices, taking turns.

The loop stays the same; this trainer group puts the engines to sleep around the step. With
max_staleness 0 no rollout is under way while a batch trains, so nothing is interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

from penstock.actors.engine.client import RemoteEngine
from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ports import StepReport, TrainerGroup
from penstock.dataflow.trajectory import GroupRef, iterate_groups
from penstock.rollout.pool.pool import EnginePool


class TimeSharedTrainer:
    """A `TrainerGroup` that has the devices to itself for each step.

    Consumes a closed batch. Waits for: the engines to be idle (evaluations included), then asleep. Unblocked by: those
    in service now; one that does not go to sleep or wake up is fenced off, and the step goes on.
    """

    def __init__(self, trainer: TrainerGroup, pool: EnginePool) -> None:
        self._trainer = trainer
        self._pool = pool

    async def step(self, batch: AsyncIterator[GroupRef]) -> StepReport:
        groups = [group async for group in batch]
        await self._pool.wait_idle()
        await self._all(lambda engine: engine.sleep())
        try:
            return await self._trainer.step(iterate_groups(groups))
        finally:
            await self._all(lambda engine: engine.wake())

    async def save(self, path: str) -> None:
        await self._trainer.save(path)

    async def _all(self, switch: Callable[[RemoteEngine], Awaitable[None]]) -> None:
        async def one(engine: RemoteEngine) -> None:
            try:
                await switch(engine)
            except EngineLostError as error:
                self._pool.fence(engine.engine_id, str(error))

        await asyncio.gather(*(one(engine) for engine in cast("list[RemoteEngine]", self._pool.engines())))
