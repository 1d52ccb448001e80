"""The trainer of a simulated run: the shipping client over simulated ranks in virtual processes.

    controller ─▶ TrainerClient ─▶ virtual handles ─▶ SimulatedRank, one per process ─▶ SimulatedTrainer, shared

Rank 0 computes, and the other ranks wait for it, as in a collective. How long a call may take, which ranks count as
lost and what follows from that is decided by the client and by platform/run/launch.py.
"""

from __future__ import annotations

import asyncio
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from ray.actor import ActorHandle

from penstock.dataflow.errors import CheckpointError
from penstock.dataflow.ports import StepReport, WeightManifest, WrittenFile
from penstock.dataflow.trajectory import GroupRef, Trajectory
from penstock.dataflow.versions import versions_per_token
from penstock.platform.run.durable_files import Files
from penstock.platform.simulator.checks import check_step
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.virtual_actor import VirtualProcess
from penstock.platform.simulator.world import InvariantError, World, task_of

NUM_RANKS = 2


@dataclass(slots=True)
class Trained:
    """Record of the trained trajectories.

    Attributes:
        lengths: Sampled tokens per trajectory.
        trimmed_tokens: Sampled tokens that carried no loss weight.
        steps: (virtual time, step seconds, tokens) per step taken.
    """

    tasks: set[int] = field(default_factory=set)
    lengths: list[int] = field(default_factory=list)
    trimmed_tokens: int = 0
    max_staleness: int = 0
    steps: list[tuple[float, float, int]] = field(default_factory=list)


class SimulatedRank:
    """One rank. Its calls run one after another, except those that Ray runs in threads of their own."""

    def __init__(self, trainer: SimulatedTrainer, index: int) -> None:
        self._trainer = trainer
        self._index = index
        self._turn = asyncio.Lock()

    async def rendezvous(self) -> tuple[str, int]:
        """There are no sockets."""
        return self._trainer.node_id, 1

    async def start(self, _host: str, _port: int) -> tuple[str, int]:
        return self._trainer.node_id, self._trainer.version

    async def step(self, groups: Sequence[GroupRef], version: int) -> StepReport:
        return cast("StepReport", await self._together("step", groups, version))

    async def accumulate(self, groups: Sequence[GroupRef], version: int) -> None:
        await self._together("accumulate", groups, version)

    async def export(self, version: int) -> WeightManifest:
        return cast("WeightManifest", await self._together("export", version))

    async def held_weights(self, _version: int) -> None:
        """There are no weights."""

    async def save_hf(self, _path: str, _version: int, *_held: None) -> None:
        """There are no weights to save, but rank 0 answers only if its process does."""

    async def snapshot(self, version: int) -> None:
        await self._together("snapshot", version)

    async def write_checkpoint(self, folder: str) -> WrittenFile:
        return await self._trainer.write_checkpoint(folder, self._index)

    async def read_back(self, _manifest: WeightManifest) -> None:
        """Engines need no bytes."""

    async def is_alive(self) -> bool:
        return True

    async def shutdown(self) -> None:
        """Nothing is shared with other processes."""

    async def _together(self, method: str, *arguments: Any) -> Any:
        async with self._turn:
            return await self._trainer.together(self._index, method, *arguments)


class SimulatedTrainer:
    """What the ranks hold together.

    Attributes:
        bad_step_rate: Probability that the numbers of a step are not finite: it is not taken.
        death_rate: Probability that a rank dies in a step.
        hang_rate: Probability that a step never returns. Of half of them, a process stops as well.
        hangs: Whether a step has not returned.
        trained: What was trained into the policy it holds.
        version: Of that policy.
        processes: Of the ranks.
    """

    def __init__(self, world: World, config: SimulationConfig, disk: Files, *, is_checked: bool) -> None:
        self.node_id = "simulated"
        self.bad_step_rate = 0.0
        self.death_rate = 0.0
        self.hang_rate = 0.0
        self.hangs = False
        self.trained = Trained()
        self.version = 0
        self.processes = [VirtualProcess(SimulatedRank(self, rank), lambda: None) for rank in range(NUM_RANKS)]
        self._num_calls = [0] * NUM_RANKS
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._parts: list[GroupRef] = []
        self._snapshot = b""
        self._disk = disk
        self._world = world
        self._config = config
        self._is_checked = is_checked
        self._rng = world.rng("trainer")

    @property
    def ranks(self) -> list[ActorHandle]:
        """Handles of the ranks, for the client."""
        return [cast("ActorHandle", process.handle) for process in self.processes]

    def end(self) -> None:
        """End the processes of all ranks."""
        for process in self.processes:
            process.die()

    async def together(self, rank: int, method: str, *arguments: Any) -> Any:
        """A collective call: rank 0 does it, and every rank gets the result."""
        number, self._num_calls[rank] = self._num_calls[rank], self._num_calls[rank] + 1
        result = self._results.setdefault(number, asyncio.get_running_loop().create_future())
        if min(self._num_calls) > number:
            del self._results[number]
        if rank:
            return await result
        answer = await getattr(self, method)(*arguments)
        result.set_result(answer)
        return answer

    async def accumulate(self, groups: Sequence[GroupRef], version: int) -> None:
        """Compute the gradient of a part of a batch."""
        self._check_version(version)
        self._parts += groups
        await asyncio.sleep(self._compute_s(sum(group.num_tokens for group in groups)))

    async def step(self, groups: Sequence[GroupRef], version: int) -> StepReport:
        """Compute the gradient of the last part, and take the step."""
        self._check_version(version)
        batch, self._parts = [*self._parts, *groups], []
        num_tokens = sum(group.num_tokens for group in batch)
        busy_s = self._config.train_fixed_s + self._compute_s(num_tokens)
        left_s = self._config.train_fixed_s + self._compute_s(sum(group.num_tokens for group in groups))
        if self._is_checked:
            check_step(batch, self.loss_weights(batch), self.version, self._config.eta)
        draw = self._rng.random()
        if draw < self.death_rate + self.hang_rate:
            await asyncio.sleep(left_s * self._rng.random())
            await self._lose(dies=draw < self.death_rate)
        if draw < self.death_rate + self.hang_rate + self.bad_step_rate:
            self._world.faults["bad step"] += 1
            self._world.note(f"the step at v{self.version} had numbers that are not finite")
            await asyncio.sleep(left_s * self._rng.random())
            return StepReport(self.version, skipped=True, metrics={}, busy_s=busy_s)
        await asyncio.sleep(left_s)
        self._account(batch, busy_s, num_tokens)
        self.version += 1
        return StepReport(self.version, skipped=False, metrics={}, busy_s=busy_s)

    async def rest(self) -> None:
        """Do nothing."""

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
        found = [pickle.loads(self._disk.read(folder / trainer_file(rank))) for rank in range(NUM_RANKS)]  # noqa: S301 - our own
        if len({version for version, _ in found}) > 1:
            raise InvariantError("durability", f"{folder}: the ranks have v{[version for version, _ in found]}")
        self.version, self.trained = found[0]

    async def export(self, version: int) -> WeightManifest:
        """Write the weights of this version for the engines."""
        self._check_version(version)
        return WeightManifest(version, "simulated", (), self._config.weight_bytes, checksum=version * 31 + 7)

    async def _lose(self, *, dies: bool) -> None:
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

    def _compute_s(self, num_tokens: int) -> float:
        return num_tokens * (self._config.train_s_per_token * self._config.grain) / self._config.trainer_devices

    def loss_weights(self, groups: Sequence[GroupRef]) -> list[np.ndarray]:
        """Loss weight of each token: its mask divided by the number of trained tokens of the whole batch."""
        masks = [token_mask(member, group.min_version) for group in groups for member in group.handle.trajectories]
        normaliser = sum(mask.sum() for mask in masks)
        return [mask / max(normaliser, 1.0) for mask in masks]

    def _account(self, groups: Sequence[GroupRef], step_s: float, batch_tokens: int) -> None:
        trained = self.trained
        trained.steps.append((asyncio.get_running_loop().time(), step_s, batch_tokens))
        for group in groups:
            trained.max_staleness = max(trained.max_staleness, group.staleness(self.version))
            trained.trimmed_tokens += group.num_trimmed_tokens
            task = task_of(int(group.handle.trajectories[0].token_ids[0]))
            if self._is_checked and task in trained.tasks:
                raise InvariantError("I5", f"task {task} is trained a second time into the same policy")
            trained.tasks.add(task)
            trained.lengths += [member.num_sampled_tokens for member in group.handle.trajectories]


def token_mask(trajectory: Trajectory, min_version: int) -> np.ndarray:
    """`[T] float64`: 1 on sampled tokens that are not trimmed."""
    mask = trajectory.loss_mask.astype(np.float64)
    if trajectory.oldest_version < min_version:
        mask[trajectory.loss_mask] = versions_per_token(trajectory.spans) >= min_version
    return mask


def trainer_file(rank: int) -> str:
    """Name of a rank's file in a checkpoint."""
    return f"trainer_{rank:05d}.pickle"
