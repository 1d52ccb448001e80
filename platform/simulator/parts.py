"""The simulated components other than engines: tasks, tokenizer, payload store, environments."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import GroupPayload
from penstock.envs.environment import Action, EndpointAccess
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.world import EVALUATION_TASKS, World, prompt_ids
from penstock.rollout.tokenization.tokenizers import TokenCodec


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

    def encode_prompt(
        self, prompt: str | Sequence[dict[str, str]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        assert isinstance(prompt, str)
        assert not tools
        return prompt_ids(int(prompt), self._prompt_tokens)

    def encode_observation(
        self, content: str | Sequence[dict[str, str]], _last_token: int, _calls: Sequence[str] = ()
    ) -> tuple[int, ...]:
        assert isinstance(content, str)
        return prompt_ids(int(content), self._observation_tokens)

    def decode(self, _token_ids: Iterable[int]) -> str:
        return ""

    def decode_prompt(self, _token_ids: Iterable[int]) -> str:
        return ""


class SimulatedStore:
    """A payload is its own handle."""

    async def put(self, payload: GroupPayload) -> GroupPayload:
        return payload

    async def get(self, handle: GroupPayload) -> GroupPayload:
        return handle


class SimulatedEpisode:
    """A `PlayedEpisode` of one thread."""

    def __init__(self, source: SimulatedEnvironments, task: Task) -> None:
        self._source = source
        self._task = task
        self._num_turns = 0

    async def reset(self) -> EpisodeReply:
        """Return the prompt."""
        return {"content": str(self._task.prompt), "role": "user"}

    async def step(self, _action: Action) -> EpisodeReply:
        """Return an observation after the time of the tool; after the last turn, return the end immediately."""
        self._num_turns += 1
        if self._num_turns == self._source.turns(self._task):
            return {"done": True}
        await self._source.work(self._task)
        return {"content": str(self._task.prompt), "role": "tool"}

    async def step_all(self, actions: Sequence[Action]) -> NoReturn:
        raise AssertionError(f"{self._task.task_id} gets {len(actions)} turns at once, it asked for one")

    async def run(self, _access: EndpointAccess) -> NoReturn:
        raise AssertionError(f"{self._task.task_id} is run, but it never said that it runs itself")

    async def cut_off(self) -> NoReturn:
        raise AssertionError(f"{self._task.task_id} is cut off, but it never said that it runs itself")


class SimulatedEnvironments:
    """Opens episodes. Waits for: one of `places` to be free. Unblocked by: the end of another episode."""

    episode = SimulatedEpisode

    def __init__(self, world: World, config: SimulationConfig) -> None:
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
                yield self.episode(self, task)
            finally:
                self._world.environment_s += (clock() - opened_s) * is_training

    async def work(self, _task: Task) -> None:
        """Simulate the work of the environment for one turn: lognormal around `tool_mean_s`."""
        config, tool_s = self._config, 0.0
        if config.tool_mean_s:
            mu = math.log(config.tool_mean_s) - config.tool_sigma**2 / 2
            tool_s = min(self._rng.lognormvariate(mu, config.tool_sigma), config.tool_cap_s)
        await asyncio.sleep(tool_s)

    def turns(self, task: Task) -> int:
        """Number of turns after which an episode ends."""
        return self._world.lengths.turns(number_of(task.task_id))
