"""Rewards, environments and trainer of a simulated run, with faults and checks."""

from __future__ import annotations

import asyncio
import pickle
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
from ray.actor import ActorHandle

from penstock.actors.reward.actor import Result
from penstock.dataflow.errors import CheckpointError, TrajectoryError
from penstock.dataflow.ports import Score, StepReport, WeightManifest, WrittenFile
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import GroupRef, Trajectory
from penstock.dataflow.versions import versions_per_token
from penstock.envs.environment import Action, EndpointAccess
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.platform.run.durable_files import Files
from penstock.platform.simulator.parts import SimulatedEnvironments, SimulatedEpisode, number_of
from penstock.platform.simulator.rewards import NUM_WORKERS, SimulatedRewardActor, SimulatedRewards, SimulatedScoring
from penstock.platform.simulator.trainer import NUM_RANKS, SimulatedRank, SimulatedTrainer
from penstock.platform.simulator.world import EVALUATION_TASKS, task_of
from tests.simulation.checks import check_step
from tests.simulation.config import FaultRates, FaultyConfig
from tests.simulation.processes import FaultyProcess
from tests.simulation.world import CheckedWorld, InvariantError

NO_FAULTS = FaultRates()
HANG_S = 30.0
"""Time limit after which a hanging reward or environment process is killed, seconds."""


class CheckedEpisode(SimulatedEpisode):
    """Its turns arrive in order."""

    is_begun = False

    async def reset(self) -> EpisodeReply:
        if self.is_begun:
            raise InvariantError("episode", f"{self._task.task_id} is reset after {self._num_turns} turns")
        self.is_begun = True
        return await super().reset()

    async def step(self, action: Action) -> EpisodeReply:
        turns = self._source.turns(self._task)
        is_next = self.is_begun and action.turn == self._num_turns
        if not is_next or action.turn >= turns or action.is_truncated:
            raise InvariantError(
                "episode", f"{self._task.task_id} gets {action} after {self._num_turns} of {turns} turns"
            )
        return await super().step(action)

    async def step_all(self, actions: Sequence[Action]) -> NoReturn:
        raise InvariantError("episode", f"{self._task.task_id} gets {len(actions)} turns at once, it asked for one")

    async def run(self, _access: EndpointAccess) -> NoReturn:
        raise InvariantError("episode", f"{self._task.task_id} is run, but it never said that it runs itself")


class FaultyEnvironments(SimulatedEnvironments):
    """Environments that raise and hang."""

    episode = CheckedEpisode
    faults = NO_FAULTS
    _world: CheckedWorld

    async def work(self, task: Task) -> None:
        """Simulate the work of the environment for one turn.

        Raises:
            TrajectoryError: Of kind `env`, if it raises or hangs.
        """
        faults, draw = self.faults if number_of(task.task_id) < EVALUATION_TASKS else NO_FAULTS, self._rng.random()
        if draw < faults.environment_hangs:
            self._world.faults["environment hang"] += 1
            await asyncio.sleep(HANG_S)
            raise TrajectoryError("env", f"{task.task_id}: step took longer than {HANG_S:.0f} s")
        await super().work(task)
        if draw < faults.environment_hangs + faults.environment_raises:
            self._world.faults["environment exception"] += 1
            raise TrajectoryError("env", f"{task.task_id}: step raised ValueError: planted")


class FaultyScoring(SimulatedScoring):
    """Failures that are data.

    Evaluations have no faults of their own, so that their results can be compared; a lost worker affects them too.
    """

    _rewards: FaultyRewards

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Score one trajectory.

        Raises:
            TrajectoryError: If the reward raises, or hangs until its time limit.
        """
        rewards = self._rewards
        is_training = task_of(int(trajectory.token_ids[0])) < EVALUATION_TASKS
        faults, draw = rewards.faults if is_training else NO_FAULTS, rewards.rng.random()
        if draw < faults.reward_hangs:
            async with rewards.free:
                rewards.world.faults["reward hang"] += 1
                await asyncio.sleep(HANG_S)
            raise TrajectoryError("reward", f"{task.task_id}: no score within {HANG_S:.0f} s")
        score = await super().score(task, trajectory)
        if draw < faults.reward_hangs + faults.reward_raises:
            rewards.world.faults["reward exception"] += 1
            raise TrajectoryError("reward", f"{task.task_id}: ValueError: planted")
        return score


class FaultyRewardActor(SimulatedRewardActor):
    """Its process may stop answering between a score and its delivery."""

    def __init__(self, rewards: FaultyRewards, index: int) -> None:
        super().__init__(FaultyScoring(rewards))
        self._rewards = rewards
        self._index = index

    async def score(self, label: str, body: bytes) -> Result:
        result = await super().score(label, body)
        self._rewards.maybe_lose(self._index)
        return result


class FaultyRewards(SimulatedRewards):
    """Workers that die and hang.

    Attributes:
        faults: Their frequencies. The first worker has none, because without workers nothing can be scored.
        num_killed: Processes that the client has ended.
    """

    world: CheckedWorld

    def __init__(self, world: CheckedWorld, mean_s: float, workers: int) -> None:
        self.faults = NO_FAULTS
        self.num_killed = 0
        self._processes: dict[int, FaultyProcess] = {}
        super().__init__(world, mean_s, workers)

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

    def _start(self, index: int) -> ActorHandle:
        actor = FaultyRewardActor(self, index)
        process = self._processes[index] = FaultyProcess(actor, actor.end)
        return cast("ActorHandle", process.handle)

    def _kill(self, actor: ActorHandle) -> None:
        self.num_killed += 1
        super()._kill(actor)


class FaultyRank(SimulatedRank):
    """A rank whose state is in checkpoints."""

    _trainer: FaultyTrainer

    async def snapshot(self, version: int) -> None:
        await self._together("snapshot", version)

    async def write_checkpoint(self, folder: str) -> WrittenFile:
        return await self._trainer.write_checkpoint(folder, self._index)


class FaultyTrainer(SimulatedTrainer):
    """Ranks that die and hang, and steps whose numbers are not finite. Every step is checked.

    Attributes:
        bad_step_rate: Probability that the numbers of a step are not finite: it is not taken.
        death_rate: Probability that a rank dies in a step.
        hang_rate: Probability that a step never returns. Of half of them, a process stops as well.
        hangs: Whether a step has not returned.
    """

    rank = FaultyRank
    process = FaultyProcess
    processes: list[FaultyProcess]
    _world: CheckedWorld

    def __init__(self, world: CheckedWorld, config: FaultyConfig, disk: Files) -> None:
        super().__init__(world, config)
        self.bad_step_rate = 0.0
        self.death_rate = 0.0
        self.hang_rate = 0.0
        self.hangs = False
        self._snapshot = b""
        self._disk = disk
        self._rng = world.rng("trainer")

    def end(self) -> None:
        """End the processes of all ranks."""
        for process in self.processes:
            process.die()

    async def accumulate(self, groups: Sequence[GroupRef], version: int) -> None:
        self._check_version(version)
        await super().accumulate(groups, version)

    async def step(self, groups: Sequence[GroupRef], version: int) -> StepReport:
        self._check_version(version)
        batch, fixed_s = [*self._parts, *groups], self._config.train_fixed_s
        left_s = fixed_s + self._compute_s(sum(group.num_tokens for group in groups))
        check_step(batch, self.loss_weights(batch), self.version, self._config.eta)
        draw = self._rng.random()
        if draw < self.death_rate + self.hang_rate:
            await asyncio.sleep(left_s * self._rng.random())
            await self._lose(dies=draw < self.death_rate)
        if draw < self.death_rate + self.hang_rate + self.bad_step_rate:
            self._world.faults["bad step"] += 1
            self._world.note(f"the step at v{self.version} had numbers that are not finite")
            self._parts = []
            await asyncio.sleep(left_s * self._rng.random())
            busy_s = fixed_s + self._compute_s(sum(group.num_tokens for group in batch))
            return StepReport(self.version, skipped=True, metrics={}, busy_s=busy_s)
        return await super().step(groups, version)

    async def export(self, version: int) -> WeightManifest:
        self._check_version(version)
        return await super().export(version)

    async def snapshot(self, version: int) -> None:
        """Copy the state to memory."""
        self._check_version(version)
        self._snapshot = pickle.dumps((self.version, self.trained))

    async def write_checkpoint(self, folder: str, rank: int) -> WrittenFile:
        """Write the last snapshot; every rank its file.

        Raises:
            CheckpointError: If the disk refuses it.
        """
        path, data = Path(folder) / trainer_file(rank), self._snapshot
        try:
            self._disk.write(path, data)
            await asyncio.sleep(0)
            self._disk.sync(path)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: {error}") from error
        return WrittenFile(path.name, len(data), zlib.crc32(data))

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        found = [pickle.loads(self._disk.read(folder / trainer_file(rank))) for rank in range(NUM_RANKS)]
        if len({version for version, _ in found}) > 1:
            raise InvariantError("durability", f"{folder}: the ranks have v{[version for version, _ in found]}")
        self.version, self.trained = found[0]

    def loss_weights(self, groups: Sequence[GroupRef]) -> list[np.ndarray]:
        """Loss weight of each token: its mask divided by the number of trained tokens of the whole batch."""
        masks = [token_mask(member, group.min_version) for group in groups for member in group.handle.trajectories]
        normaliser = sum(mask.sum() for mask in masks)
        return [mask / max(normaliser, 1.0) for mask in masks]

    def _account(self, groups: Sequence[GroupRef], step_s: float, batch_tokens: int) -> None:
        known = set(self.trained.tasks)
        for group in groups:
            task = task_of(int(group.handle.trajectories[0].token_ids[0]))
            if task in known:
                raise InvariantError("I5", f"task {task} is trained a second time into the same policy")
            known.add(task)
        super()._account(groups, step_s, batch_tokens)

    async def _lose(self, *, dies: bool) -> Any:
        """Never return, as a collective whose rank has died or hangs."""
        rank, name = self._rng.randrange(NUM_RANKS), "trainer crash" if dies else "rank hang"
        self._world.faults[name] += 1
        self._world.note(f"{name}: rank {rank} at v{self.version}")
        if dies:
            self.processes[rank].die()
        elif self._rng.random() < 0.5:
            self.processes[rank].hang()
        self.hangs = True
        await asyncio.Event().wait()

    def _check_version(self, version: int) -> None:
        if version != self.version:
            raise InvariantError("trainer", f"the client asks for v{version}, the ranks hold v{self.version}")


def token_mask(trajectory: Trajectory, min_version: int) -> np.ndarray:
    """`[T] float64`: 1 on sampled tokens that are not trimmed."""
    mask = trajectory.loss_mask.astype(np.float64)
    if trajectory.oldest_version < min_version:
        mask[trajectory.loss_mask] = versions_per_token(trajectory.spans) >= min_version
    return mask


def trainer_file(rank: int) -> str:
    """Name of a rank's file in a checkpoint."""
    return f"trainer_{rank:05d}.pickle"
