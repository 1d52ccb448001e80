"""Trainer and engines on the same devices, taking turns.

The loop stays the same; this trainer group puts the engines to sleep around the step. With
max_staleness 0 no rollout is under way while a batch trains, so nothing is interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from penstock.dataflow.ports import StepReport, TrainerGroup
from penstock.dataflow.trajectory import GroupRef
from penstock.platform.streams import stream_of
from penstock.rollout.local_engine import Sleeper
from penstock.rollout.pool import EnginePool


class TakesTurns:
    """A `TrainerGroup` that has the devices to itself for each step.

    Consumes a closed batch. Waits for: the engines to be idle (evaluations included), then asleep.
    """

    def __init__(self, trainer: TrainerGroup, engines: Sequence[Sleeper], pool: EnginePool) -> None:
        self._trainer = trainer
        self._engines = engines
        self._pool = pool

    async def step(self, batch: AsyncIterator[GroupRef]) -> StepReport:
        groups = [group async for group in batch]
        await self._pool.idle()
        await asyncio.gather(*(engine.sleep() for engine in self._engines))
        try:
            return await self._trainer.step(stream_of(groups))
        finally:
            await asyncio.gather(*(engine.wake() for engine in self._engines))

    async def save(self, path: str) -> None:
        await self._trainer.save(path)
