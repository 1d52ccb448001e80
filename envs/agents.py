"""Programs that ask the policy themselves, over the OpenAI API, as episodes: `env=agent`.

The task comes from any task source. The program is a command, in a process of its own, or an asynchronous function
`agent(task, client)`, in a process that is already warm. It gets an address and a key (envs/endpoint); when it ends,
the episode ends.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.trajectory import Task
from penstock.envs.agent_command import run_command
from penstock.envs.config import EnvConfig
from penstock.envs.contract import RewardResult
from penstock.envs.environment import Done, EndpointAccess, Playable, RunsItself
from penstock.envs.import_path import load_object
from penstock.envs.loading import load_task_source

if TYPE_CHECKING:
    from openai import AsyncOpenAI

AgentFunction = Callable[[Task, Any], Awaitable[RewardResult | None]]
Run = Callable[[Task, EndpointAccess], Awaitable[RewardResult | None]]


class AgentTasks:
    """Task source whose tasks are given to a program.

    Args:
        seed: As given to the task source.
        tasks: Name or import path of the task source; whatever environment it has is not used.
        agent: Words of a command; or import path of an `async def agent(task, client)` that returns a reward, a dict of
            named rewards, or None, where `client` is an `openai.AsyncOpenAI`.
        task_args: Keyword arguments of the task source.

    Raises:
        ConfigError: If a path does not resolve, or names no asynchronous function.
        ValueError: If the command has no words, or there is no such program.
    """

    def __init__(
        self, seed: int, tasks: str, agent: str | Sequence[str], task_args: Mapping[str, Any] | None = None
    ) -> None:
        if not isinstance(tasks, str) or not agent:
            raise ValueError(
                f"env.args.tasks={tasks!r} has to name a task source, env.args.agent={agent!r} a command (not an empty "
                "command) or an asynchronous function"
            )
        self._source = load_task_source(EnvConfig(factory=tasks, args=dict(task_args or {})), seed)
        self._run = _in_this_process(agent) if isinstance(agent, str) else _as_command(agent)
        if hasattr(self._source, "gold_actions"):
            self.gold_actions = self._source.gold_actions

    def train(self) -> Iterator[Task]:
        """As the task source."""
        return self._source.train()

    def held_out(self, num_tasks: int) -> list[Task]:
        """As the task source."""
        return self._source.held_out(num_tasks)

    def environment(self) -> AgentEpisode:
        """One run of the program."""
        return AgentEpisode(self._run)


class AgentEpisode(Playable):
    """One run of a program."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def reset(self, task: Task) -> RunsItself:
        """Keep the task; nothing starts yet."""
        self.task = task
        return RunsItself()

    async def run(self, access: EndpointAccess) -> Done:
        """Run it to its end."""
        return Done(await self._run(self.task, access))


def _as_command(words: Sequence[str]) -> Run:
    command = [str(word) for word in words]
    if shutil.which(command[0]) is None:
        raise ValueError(f"there is no program {command[0]!r} on the path")
    return lambda task, access: run_command(command, task, access)


def _in_this_process(path: str) -> Run:
    function: AgentFunction = load_object(path, "env.args.agent")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            [
                f"env.args.agent={path!r} is {function!r:.60}, no `async def agent(task, client)`. Write one, or give "
                "the words of a command: env.args.agent=[python, my_agent.py]."
            ]
        )
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            [f"env.args.agent={path!r} needs the client library: pip install 'penstock[envs]', or use a command."]
        ) from error

    async def run(task: Task, access: EndpointAccess) -> RewardResult | None:
        async with open_client(access) as client:
            return await function(task, client)

    return run


def open_client(access: EndpointAccess) -> AsyncOpenAI:
    """The official client of a session; closed by `async with`."""
    import openai

    # The endpoint is near and speaks plain HTTP: no proxy, and no certificates, which take long to load.
    http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, http_client=http)
