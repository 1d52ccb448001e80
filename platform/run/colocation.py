"""Time-sharing of devices between trainer and engines (colocated placement).

The controller's loop is unchanged: the engines sleep around each step of the trainer (`TrainerClient.turn`). With
max_staleness 0 no rollout is in flight while a batch trains, so no request is interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

from penstock.actors.engine.client import RemoteEngine
from penstock.actors.frozen_policies import FrozenPolicyClient
from penstock.dataflow.errors import EngineLostError
from penstock.rollout.engine_pool.pool import EnginePool


@asynccontextmanager
async def engines_asleep(pool: EnginePool, frozen: Sequence[FrozenPolicyClient] = ()) -> AsyncIterator[None]:
    """Within it, the trainer has exclusive use of the devices.

    Waits for: all engines to be idle (evaluations included), then asleep, and frozen policies that share the devices to
    rest. Unblocked by: the engines in service; one that fails to sleep or wake up is fenced, and the step continues
    without it. After a step that fails they stay asleep, because its ranks may still hold the memory; going back to a
    checkpoint wakes them (`RunActors.roll_back`).
    """
    await pool.wait_idle()
    await _call_each_engine(pool, lambda engine: engine.sleep())
    async with AsyncExitStack() as resting:
        for policy in frozen:
            await resting.enter_async_context(policy.at_rest())
        yield
    await _call_each_engine(pool, lambda engine: engine.wake())


async def _call_each_engine(pool: EnginePool, call: Callable[[RemoteEngine], Awaitable[None]]) -> None:
    """Call all engines concurrently. An engine that is lost is fenced instead of failing the step."""

    async def call_or_fence(engine: RemoteEngine) -> None:
        try:
            await call(engine)
        except EngineLostError as error:
            pool.fence(engine.engine_id, str(error))

    await asyncio.gather(*(call_or_fence(engine) for engine in cast("list[RemoteEngine]", pool.engines())))
