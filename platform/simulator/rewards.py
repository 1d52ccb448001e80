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

from penstock.actors.reward.actor import Result, RewardActor, Scoring
from penstock.actors.reward.client import RewardClient
from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ports import Score
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.envs.workers.scoring import RewardRunner
from penstock.platform.simulator.config import FaultRates
from penstock.platform.simulator.parts import HANG_S, NO_FAULTS
from penstock.platform.simulator.virtual_actor import VirtualHandle, VirtualProcess
from penstock.platform.simulator.world import EVALUATION_TASKS, World, member_of, task_of, true_reward

NUM_WORKERS = 3
"""Processes; `reward_workers` is how many scores they compute at once."""


class SimulatedScoring:
    """Stands for `RewardRunner`: exponentially distributed latency, and failures that are data.

    Evaluations have no faults of their own, so that their results can be compared; a lost worker affects them too.
    """

    def __init__(self, rewards: SimulatedRewards) -> None:
        self._rewards = rewards

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Score one trajectory.

        Raises:
            TrajectoryError: If the reward raises, or hangs until its time limit.
        """
        rewards, task_number = self._rewards, task_of(int(trajectory.token_ids[0]))
        faults = rewards.faults if task_number < EVALUATION_TASKS else NO_FAULTS
        draw, score = rewards.rng.random(), Score(rewards.reward_of(task_number, member_of(trajectory.trajectory_id)))
        if rewards.mean_s == 0 and draw >= faults.reward_hangs + faults.reward_raises:
            return score
        async with rewards.free:
            if draw < faults.reward_hangs:
                rewards.world.faults["reward hang"] += 1
                await asyncio.sleep(HANG_S)
                raise TrajectoryError("reward", f"{task.task_id}: no score within {HANG_S:.0f} s")
            if rewards.mean_s:
                await asyncio.sleep(rewards.rng.expovariate(1 / rewards.mean_s))
            if draw < faults.reward_hangs + faults.reward_raises:
                rewards.world.faults["reward exception"] += 1
                raise TrajectoryError("reward", f"{task.task_id}: ValueError: planted")
        return score


class SimulatedRewardActor(RewardActor):
    """The shipping actor without a child process."""

    def __init__(self, rewards: SimulatedRewards, index: int) -> None:
        self._runner = cast("RewardRunner", SimulatedScoring(rewards))
        self._scoring = Scoring()
        self._rewards = rewards
        self._index = index

    async def score(self, label: str, body: bytes) -> Result:
        """As the shipping one. With faults, the process may stop answering between a score and its delivery."""
        result = await super().score(label, body)
        self._rewards.maybe_lose(self._index)
        return result

    def end(self) -> None:
        """Its process dies."""
        self._scoring.cancel()

    async def shutdown(self) -> None:
        """There is no child process."""


class SimulatedRewards:
    """A `RewardWorker`: the shipping client over simulated workers.

    Attributes:
        faults: Their frequencies. The first worker has none, because without workers nothing can be scored.
        mean_s: Mean latency of a score, seconds.
        num_killed: Processes that the client has ended.
        free: Scores that may be computed at once.
    """

    def __init__(self, world: World, mean_s: float, workers: int) -> None:
        self.faults: FaultRates = NO_FAULTS
        self.world = world
        self.mean_s = mean_s
        self.free = asyncio.Semaphore(workers)
        self.rng: random.Random = world.rng("rewards")
        self.num_killed = 0
        self._processes: dict[int, VirtualProcess] = {}
        self._client = RewardClient([partial(self._start, index) for index in range(NUM_WORKERS)], self._kill)

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return await self._client.score(task, trajectory)

    def reward_of(self, task: int, member: int) -> float | None:
        """What the reward function returns; tests have some without an opinion."""
        return true_reward(task, member)

    def maybe_lose(self, index: int) -> None:
        """Let a worker stop answering, with all scores that it has not delivered."""
        if index and self.rng.random() < self.faults.scores_lost:
            self.world.faults["reward worker hang"] += 1
            self.world.note(f"reward worker {index} stops answering")
            self._processes[index].hang()

    def lose_worker(self, rng: random.Random) -> None:
        """Let the process of a worker die."""
        index = rng.randrange(1, NUM_WORKERS)
        if self._processes[index].responds:
            self.world.faults["reward worker death"] += 1
            self.world.note(f"reward worker {index} dies")
            self._processes[index].die()

    async def close(self) -> None:
        await self._client.close()

    def _start(self, index: int) -> ActorHandle:
        actor = SimulatedRewardActor(self, index)
        process = self._processes[index] = VirtualProcess(actor, actor.end)
        return cast("ActorHandle", process.handle)

    def _kill(self, actor: ActorHandle) -> None:
        self.num_killed += 1
        cast("VirtualHandle", actor).process.die()
