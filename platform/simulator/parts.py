"""The simulated components other than engines: tasks, tokenizer, payload store, environments, trainer."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from penstock.dataflow.errors import TrainingError, TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ports import StepReport, WeightManifest, WrittenFile
from penstock.dataflow.trajectory import GroupPayload, GroupRef, Task, Trajectory
from penstock.dataflow.versions import versions_per_token
from penstock.envs.environment import Action, EndpointAccess
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.platform.run.durable_files import Files
from penstock.platform.simulator.checks import check_step
from penstock.platform.simulator.config import FaultRates, SimulationConfig
from penstock.platform.simulator.world import InvariantError, World, prompt_ids, task_of
from penstock.rollout.tokenization.tokenizers import TokenCodec

TRAINER_FILE = "trainer_00000.pickle"
EVALUATION_TASKS = 1_000_000
"""First number of evaluation tasks, above all numbers of training tasks."""


def make_task(number: int, environment: str | None = None) -> Task:
    return Task(TaskId(f"simulated/{number}"), str(number), {}, environment)


def number_of(task_id: TaskId) -> int:
    """The number that a task was made from."""
    return int(task_id.rpartition("/")[2])


class TrainingTasks(Iterator[Task]):
    """Every `every`-th training task from `first` on, without end.

    Attributes:
        num_taken: Tasks taken so far.
    """

    def __init__(self, environment: str | None = None, first: int = 0, every: int = 1) -> None:
        self.num_taken = 0
        self._environment = environment
        self._numbers = itertools.count(first, every)

    def __next__(self) -> Task:
        self.num_taken += 1
        return make_task(next(self._numbers), self._environment)


class SimulatedCodec(TokenCodec):
    """Encodes prompts and observations as the repeated number of their task. Answers have no text."""

    def __init__(self, prompt_tokens: int, observation_tokens: int = 1) -> None:
        self._observation_tokens = observation_tokens
        self.stop_token_ids = (0,)
        self._prompt_tokens = prompt_tokens

    def encode_prompt(self, prompt: str | Sequence[dict[str, str]]) -> tuple[int, ...]:
        assert isinstance(prompt, str)
        return prompt_ids(int(prompt), self._prompt_tokens)

    def encode_observation(self, content: str | Sequence[dict[str, str]], _last_token: int) -> tuple[int, ...]:
        assert isinstance(content, str)
        return prompt_ids(int(content), self._observation_tokens)

    def decode(self, _token_ids: Iterable[int]) -> str:
        return ""


class SimulatedStore:
    """A payload is its own handle."""

    async def put(self, payload: GroupPayload) -> GroupPayload:
        return payload

    async def get(self, handle: GroupPayload) -> GroupPayload:
        return handle


NO_FAULTS = FaultRates()
HANG_S = 30.0
"""Time limit after which a hanging reward or environment process is killed, seconds."""


class SimulatedEnvironments:
    """An `EpisodeSource`. Waits for: one of `places` to be free. Unblocked by: the end of another episode."""

    def __init__(self, world: World, config: SimulationConfig) -> None:
        self.faults = NO_FAULTS
        self._world = world
        self._config = config
        self._free = asyncio.Semaphore(config.environments)
        self._rng = world.rng("environments")

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[SimulatedEpisode]:
        is_training = number_of(task.task_id) < EVALUATION_TASKS
        clock = asyncio.get_running_loop().time
        async with self._free:
            opened_s = clock()
            try:
                yield SimulatedEpisode(self, task, self.faults if is_training else NO_FAULTS)
            finally:
                self._world.environment_s += (clock() - opened_s) * is_training

    async def work(self, task: Task, faults: FaultRates) -> None:
        """Simulate the work of the environment for one turn.

        Raises:
            TrajectoryError: Of kind `env`, if it raises or hangs.
        """
        draw, config = self._rng.random(), self._config
        if draw < faults.environment_hangs:
            self._world.faults["environment hang"] += 1
            await asyncio.sleep(HANG_S)
            raise TrajectoryError("env", f"{task.task_id}: step took longer than {HANG_S:.0f} s")
        tool_s = 0.0
        if config.tool_mean_s:  # lognormal around it
            mu = math.log(config.tool_mean_s) - config.tool_sigma**2 / 2
            tool_s = min(self._rng.lognormvariate(mu, config.tool_sigma), config.tool_cap_s)
        await asyncio.sleep(tool_s)
        if draw < faults.environment_hangs + faults.environment_raises:
            self._world.faults["environment exception"] += 1
            raise TrajectoryError("env", f"{task.task_id}: step raised ValueError: planted")

    def turns(self, task: Task) -> int:
        """Number of turns after which an episode ends."""
        return self._world.lengths.turns(number_of(task.task_id))


class SimulatedEpisode:
    """A `PlayedEpisode` of one thread."""

    def __init__(self, source: SimulatedEnvironments, task: Task, faults: FaultRates) -> None:
        self._source = source
        self._task = task
        self._faults = faults
        self._num_turns = -1

    async def reset(self) -> EpisodeReply:
        """Return the prompt."""
        if self._num_turns >= 0:
            raise InvariantError("episode", f"{self._task.task_id} is reset after {self._num_turns} turns")
        self._num_turns = 0
        return {"content": str(self._task.prompt), "role": "user"}

    async def step(self, action: Action) -> EpisodeReply:
        """Return an observation after the time of the tool; after the last turn, return the end immediately."""
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


class RankDiedError(TrainingError):
    """An injected death of a trainer rank. The run ends, and a new driver resumes it."""


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


class SimulatedTrainer:
    """`TrainerGroup`, and the export that the publisher asks for.

    Attributes:
        bad_step_rate: Probability that the numbers of a step are not finite: it is not taken.
        death_rate: Probability that a rank dies in a step.
        trained: What was trained into the policy it holds.
    """

    def __init__(self, world: World, config: SimulationConfig, disk: Files, *, is_checked: bool) -> None:
        self.node_id = "simulated"
        self.bad_step_rate = 0.0
        self.death_rate = 0.0
        self.trained = Trained()
        self._snapshot = b""
        self._disk = disk
        self._world = world
        self._config = config
        self._is_checked = is_checked
        self._version = 0
        self._rng = world.rng("trainer")

    async def step(self, batch: AsyncIterator[GroupRef]) -> StepReport:
        clock, done_at = asyncio.get_running_loop().time, 0.0
        groups = []
        async for group in batch:  # a whole batch arrives at once, a streamed one as its groups become ready
            groups.append(group)
            done_at = max(done_at, clock()) + self._compute_s(group.num_tokens)
        num_tokens = sum(group.num_tokens for group in groups)
        busy_s, left_s = (
            self._config.train_fixed_s + self._compute_s(num_tokens),
            done_at - clock() + self._config.train_fixed_s,
        )
        if self._is_checked:
            check_step(groups, self.loss_weights(groups), self._version, self._config.eta)
        draw = self._rng.random()
        if draw < self.death_rate:
            self._world.faults["trainer crash"] += 1
            await asyncio.sleep(left_s * self._rng.random())
            self._world.note(f"a rank of the trainer died at v{self._version}")
            raise RankDiedError(f"trainer: step: a process died at v{self._version}: planted")
        if draw < self.death_rate + self.bad_step_rate:
            self._world.faults["bad step"] += 1
            self._world.note(f"the step at v{self._version} had numbers that are not finite")
            await asyncio.sleep(left_s * self._rng.random())
            return StepReport(self._version, skipped=True, metrics={}, busy_s=busy_s)
        await asyncio.sleep(left_s)
        self._account(groups, busy_s, num_tokens)
        self._version += 1
        return StepReport(self._version, skipped=False, metrics={}, busy_s=busy_s)

    def _compute_s(self, num_tokens: int) -> float:
        return num_tokens * (self._config.train_s_per_token * self._config.grain) / self._config.trainer_devices

    async def save(self, _path: str) -> None:
        """There are no weights."""

    async def snapshot(self) -> float:
        self._snapshot = pickle.dumps((self._version, self.trained))
        return 0.0

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        path, data = Path(folder) / TRAINER_FILE, self._snapshot
        self._disk.write(path, data)
        await asyncio.sleep(0)
        self._disk.sync(path)
        return [WrittenFile(TRAINER_FILE, len(data), zlib.crc32(data))]

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        self._version, self.trained = pickle.loads(self._disk.read(folder / TRAINER_FILE))  # noqa: S301 - our own

    async def export(self, version: int) -> WeightManifest:
        await asyncio.sleep(0)
        return WeightManifest(version, "simulated", (), self._config.weight_bytes, checksum=version * 31 + 7)

    def read_back(self, _manifest: WeightManifest) -> None:
        return None

    def loss_weights(self, groups: Sequence[GroupRef]) -> list[np.ndarray]:
        """Loss weight of each token: its mask divided by the number of trained tokens of the whole batch."""
        masks = [token_mask(member, group.min_version) for group in groups for member in group.handle.trajectories]
        normaliser = sum(mask.sum() for mask in masks)
        return [mask / max(normaliser, 1.0) for mask in masks]

    def _account(self, groups: Sequence[GroupRef], step_s: float, batch_tokens: int) -> None:
        trained = self.trained
        trained.steps.append((asyncio.get_running_loop().time(), step_s, batch_tokens))
        for group in groups:
            trained.max_staleness = max(trained.max_staleness, group.staleness(self._version))
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
