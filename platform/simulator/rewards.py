"""The rewards of a simulated run: the shipping client and actor around simulated scoring, in virtual processes.

    flow ─▶ RewardClient ─▶ virtual handle ─▶ SimulatedRewardActor (`RewardActor`) ─▶ SimulatedScoring

Which worker counts as lost, who scores its trajectories again and how often it is restarted is the client's decision.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import cast

from ray.actor import ActorHandle

from penstock.actors.reward.actor import RewardActor, Scoring
from penstock.actors.reward.client import RewardClient
from penstock.dataflow.ports import Score
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.workers.scoring import RewardRunner
from penstock.platform.simulator.virtual_actor import VirtualHandle, VirtualProcess
from penstock.platform.simulator.world import World, member_of, task_of, true_reward

NUM_WORKERS = 3
"""Processes; `reward_workers` is how many scores they compute at once."""


class SimulatedScoring:
    """Stands for `RewardRunner`: exponentially distributed latency."""

    def __init__(self, rewards: SimulatedRewards) -> None:
        self._rewards = rewards

    async def score(self, _task: Task, trajectory: Trajectory) -> Score:
        """Score one trajectory."""
        rewards, task_number = self._rewards, task_of(int(trajectory.token_ids[0]))
        if rewards.mean_s:
            async with rewards.free:
                await asyncio.sleep(rewards.rng.expovariate(1 / rewards.mean_s))
        return Score(rewards.reward_of(task_number, member_of(trajectory.trajectory_id)))


class SimulatedRewardActor(RewardActor):
    """The shipping actor without a child process."""

    def __init__(self, scoring: SimulatedScoring) -> None:
        self._runner = cast("RewardRunner", scoring)
        self._scoring = Scoring()

    def end(self) -> None:
        """Its process dies."""
        self._scoring.cancel()

    async def shutdown(self) -> None:
        """There is no child process."""


class SimulatedRewards:
    """A `RewardWorker`: the shipping client over simulated workers.

    Attributes:
        mean_s: Mean latency of a score, seconds.
        free: Scores that may be computed at once.
    """

    def __init__(self, world: World, mean_s: float, workers: int) -> None:
        self.world = world
        self.mean_s = mean_s
        self.free = asyncio.Semaphore(workers)
        self.rng: random.Random = world.rng("rewards")
        self._client = RewardClient([partial(self._start, index) for index in range(NUM_WORKERS)], self._kill)

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return await self._client.score(task, trajectory)

    def reward_of(self, task: int, member: int) -> float | None:
        """What the reward function returns."""
        return true_reward(task, member)

    async def close(self) -> None:
        await self._client.close()

    def _start(self, _index: int) -> ActorHandle:
        actor = SimulatedRewardActor(SimulatedScoring(self))
        return cast("ActorHandle", VirtualProcess(actor, actor.end).handle)

    def _kill(self, actor: ActorHandle) -> None:
        cast("VirtualHandle", actor).process.die()
