"""Time-sharing of devices between trainer and engines (colocated placement).

The controller's loop is unchanged: this trainer group puts the engines to sleep around each step. With max_staleness 0
no rollout is in flight while a batch trains, so no request is interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

from penstock.actors.engine.client import RemoteEngine
from penstock.actors.frozen_policies import FrozenPolicyClient
from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ports import StepReport, TrainerGroup, WrittenFile
from penstock.dataflow.trajectory import GroupRef
from penstock.rollout.engine_pool.pool import EnginePool


class TimeSharedTrainer:
    """A `TrainerGroup` that has exclusive use of the devices during each step.

    Consumes: a closed batch. Waits for: all engines to be idle (evaluations included), then asleep, and frozen policies
    that share the devices to rest. Unblocked by: the engines in service; one that fails to sleep or wake up is fenced,
    and the step continues without it. After a step
    that fails they stay asleep, because its ranks may still hold the memory; going back to a checkpoint wakes them
    (`RunActors.roll_back`).
    """

    def __init__(self, trainer: TrainerGroup, pool: EnginePool, frozen: Sequence[FrozenPolicyClient] = ()) -> None:
        self._trainer = trainer
        self._pool = pool
        self._frozen = frozen

    async def step(self, batch: Sequence[GroupRef]) -> StepReport:
        await self._pool.wait_idle()
        await self._for_each_engine(lambda engine: engine.sleep())
        async with AsyncExitStack() as resting:
            for policy in self._frozen:
                await resting.enter_async_context(policy.at_rest())
            report = await self._trainer.step(batch)
        await self._for_each_engine(lambda engine: engine.wake())
        return report

    async def set_learning_rate(self, settings: Mapping[str, Any]) -> int:
        return await self._trainer.set_learning_rate(settings)

    async def stop_step(self) -> bool:
        return await self._trainer.stop_step()

    async def wait_for_step(self) -> None:
        await self._trainer.wait_for_step()

    async def save(self, path: str) -> None:
        await self._trainer.save(path)

    async def snapshot(self) -> float:
        return await self._trainer.snapshot()

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        return await self._trainer.write_checkpoint(folder)

    async def _for_each_engine(self, call: Callable[[RemoteEngine], Awaitable[None]]) -> None:
        """Call all engines concurrently. An engine that is lost is fenced instead of failing the step."""

        async def call_or_fence(engine: RemoteEngine) -> None:
            try:
                await call(engine)
            except EngineLostError as error:
                self._pool.fence(engine.engine_id, str(error))

        await asyncio.gather(*(call_or_fence(engine) for engine in cast("list[RemoteEngine]", self._pool.engines())))
