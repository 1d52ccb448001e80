"""What `env/utilisation` counts as work of an agent program: the time in which it does not wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.envs.config import EndpointConfig
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.environment import EndpointAccess
from penstock.envs.workers.environment_pool import UsageMeter
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.agents import CODEC, ReplyingEngine, chat, client_of, user

WORK_S, ANSWER_S = 0.6, 0.6


class Metered:
    """One program per episode; the environment is open and busy for as long as the program runs, as in the host."""

    def __init__(self) -> None:
        self.meter = UsageMeter()

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Any]:
        self.meter.opened += 1
        with self.meter.open.one():
            yield self

    async def reset(self) -> dict[str, bool]:
        return {"runs_itself": True}

    async def run(self, access: EndpointAccess) -> dict[str, Any]:
        with self.meter.busy.one():
            async with client_of(access) as client:
                await chat(client, [user("go on")])
            await asyncio.sleep(WORK_S)
            return {"done": True, "reward": 1.0}


class Slow(ReplyingEngine):
    async def generate(self, request: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(ANSWER_S)
        async for delta in super().generate(request):
            yield delta


async def test_an_agent_program_does_not_work_while_it_waits_for_the_policy() -> None:
    environment, endpoint = Metered(), Endpoint(EndpointConfig(), 10.0)
    player = EpisodePlayer(environment.open, CODEC, EpisodeBudget(8, 2000), endpoint, usage=environment.meter.read)
    runner = TrajectoryRunner(EnginePool([Slow(lambda _: "yes")], 64), CODEC, 20.0, episodes=player)
    sampling = SamplingParams(16, stop_token_ids=CODEC.stop_token_ids)
    task = Task(TaskId("t/0"), "?", {}, "")
    assert player.take_metrics() == {}
    try:
        await runner.run(RolloutContext(task, TrajectoryId("t/0")), 0, sampling)
        metrics = player.take_metrics()
    finally:
        await endpoint.close()
    assert environment.meter.read().busy_s > 0.95 * environment.meter.read().open_s
    assert 0.3 < metrics["env/utilisation"] < 0.7
    assert "env/utilisation" not in player.take_metrics(), "none was open since"
