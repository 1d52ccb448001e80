"""Simulated environments: what the shipping `EpisodePlayer` plays with, over turns whose tools take time.

One episode has as many turns as its task says; between two turns the environment takes a lognormal time. At most so
many are open at once. Each checks that it is played in order.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.trajectory import Task
from penstock.envs.environment import Action, EndpointAccess
from penstock.envs.episode_child import EpisodeReply
from penstock.platform.simulator.tasks import EVALUATION_TASKS, number_of
from penstock.platform.simulator.world import InvariantError, World


@dataclass(frozen=True, slots=True)
class ToolTimes:
    """Seconds between two turns: lognormal around `mean_s`, at most `cap_s`."""

    mean_s: float
    sigma: float
    cap_s: float

    def draw(self, rng: random.Random) -> float:
        if self.mean_s == 0:
            return 0.0
        return min(rng.lognormvariate(math.log(self.mean_s) - self.sigma**2 / 2, self.sigma), self.cap_s)


@dataclass(slots=True)
class EnvironmentFaults:
    """Probability of each, per turn; a hang costs `timeout_s`, after which its process is given up."""

    raises: float = 0.0
    hangs: float = 0.0
    timeout_s: float = 30.0


class SimulatedEnvironments:
    """`EpisodeSource`. Waits for: one of `places` to be free. Unblocked by: the end of another episode."""

    def __init__(self, world: World, times: ToolTimes, places: int) -> None:
        self.faults = EnvironmentFaults()
        self._world = world
        self._times = times
        self._free = asyncio.Semaphore(places)
        self._rng = world.rng("environments")

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[SimulatedEpisode]:
        is_training = number_of(task.task_id) < EVALUATION_TASKS
        clock = asyncio.get_running_loop().time
        async with self._free:
            opened_s = clock()
            try:
                yield SimulatedEpisode(self, task, self.faults if is_training else EnvironmentFaults())
            finally:
                self._world.environment_s += (clock() - opened_s) * is_training

    async def work(self, task: Task, faults: EnvironmentFaults) -> None:
        """What the environment does about one turn.

        Raises:
            TrajectoryError: kind `env`, if it raises or hangs.
        """
        draw = self._rng.random()
        if draw < faults.hangs:
            self._world.faults["environment hang"] += 1
            await asyncio.sleep(faults.timeout_s)
            raise TrajectoryError("env", f"{task.task_id}: step took longer than {faults.timeout_s:.0f} s")
        await asyncio.sleep(self._times.draw(self._rng))
        if draw < faults.hangs + faults.raises:
            self._world.faults["environment exception"] += 1
            raise TrajectoryError("env", f"{task.task_id}: step raised ValueError: planted")

    def turns(self, task: Task) -> int:
        """After so many turns an episode is over."""
        return self._world.lengths.turns(number_of(task.task_id))


class SimulatedEpisode:
    """`PlayedEpisode` of one thread."""

    def __init__(self, source: SimulatedEnvironments, task: Task, faults: EnvironmentFaults) -> None:
        self._source = source
        self._task = task
        self._faults = faults
        self._num_turns = -1

    async def reset(self) -> EpisodeReply:
        """The prompt."""
        if self._num_turns >= 0:
            raise InvariantError("episode", f"{self._task.task_id} is reset after {self._num_turns} turns")
        self._num_turns = 0
        return {"content": str(self._task.prompt), "role": "user"}

    async def step(self, action: Action) -> EpisodeReply:
        """An observation, after the tool's time; behind the last turn the end, at once."""
        turns = self._source.turns(self._task)
        if action.turn != self._num_turns or action.turn >= turns or action.is_truncated:
            raise InvariantError(
                "episode", f"{self._task.task_id} gets {action} after {self._num_turns} of {turns} turns"
            )
        self._num_turns += 1
        if self._num_turns == turns:
            return {"done": True}
        await self._source.work(self._task, self._faults)
        return {"content": str(self._task.prompt), "role": "tool"}

    async def step_all(self, actions: Sequence[Action]) -> NoReturn:
        raise InvariantError("episode", f"{self._task.task_id} gets {len(actions)} turns at once, it asked for one")

    async def run(self, _access: EndpointAccess) -> NoReturn:
        raise InvariantError("episode", f"{self._task.task_id} is run, but it never said that it runs itself")
