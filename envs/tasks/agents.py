"""Agent programs, which call the policy over the OpenAI API, as episodes: `env=agent`.

The task comes from any task source. The program is a command, in a process of its own, or an asynchronous function
`agent(task, client)`, in a process that is already running. It gets an address and a key (envs/endpoint). When it ends,
the episode ends.

A command finds the task in the file that PENSTOCK_TASK names, a descriptor of its process. Its standard input is empty:
many agents append theirs to the prompt, and the fields of a task often hold the answer. This keeps the answer out of
prompts; it is no protection against a policy that searches the processes of its user (repositories.py has a sandbox).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig
from penstock.envs.contract import RewardResult
from penstock.envs.environment import Done, EndpointAccess, Playable, RunsItself
from penstock.envs.import_path import load_object
from penstock.envs.loading import load_task_source
from penstock.envs.workers import process_tree
from penstock.envs.workers.supervisor import how_it_ended

if TYPE_CHECKING:
    from openai import AsyncOpenAI

AgentFunction = Callable[[Task, Any], Awaitable[RewardResult | None]]
Run = Callable[[Task, EndpointAccess], Awaitable[RewardResult | None]]

_TAIL_BYTES = 16 << 10
_OUTPUT_TIMEOUT_S = 1.0


class AgentTasks:
    """Task source whose tasks are given to a program.

    Args:
        seed: Seed of the task source.
        tasks: Name or import path of the task source; its environment is not used.
        agent: Words of a command, in which `{prompt}` and `{task_id}` stand for those of the task; or import path of an
            `async def agent(task, client)` that returns a reward, a dict of named rewards, or None, where `client` is
            an `openai.AsyncOpenAI`.
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
        if isinstance(agent, str):
            self._run = _in_this_process(agent)
        else:
            command = [str(word) for word in agent]
            if shutil.which(command[0]) is None:
                raise ValueError(f"there is no program {command[0]!r} on the path")
            self._run = partial(_run_command, command)
        if hasattr(self._source, "gold_actions"):
            self.gold_actions = self._source.gold_actions
        if hasattr(self._source, "stored"):
            self.stored = self._source.stored

    def train(self) -> Iterator[Task]:
        """As the task source."""
        return self._source.train()

    def held_out(self, num_tasks: int) -> list[Task]:
        """As the task source."""
        return self._source.held_out(num_tasks)

    def environment(self) -> AgentEpisode:
        """One run of the program."""
        return AgentEpisode(self._run)


class AgentProgram(Playable):
    """An episode that calls the policy itself."""

    def reset(self, task: Task) -> RunsItself:
        """Keep the task; nothing starts yet."""
        self.task = task
        return RunsItself()

    @abstractmethod
    async def run(self, access: EndpointAccess) -> Done:
        """Play the episode to its end."""

    async def cut_off(self) -> Done:
        """Called after `run` was cancelled at a budget of the episode: judge what there is, if that can be."""
        return Done(None)


class AgentEpisode(AgentProgram):
    """One run of a command or a function."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def run(self, access: EndpointAccess) -> Done:
        """Run the command or function to its end."""
        return Done(await self._run(self.task, access))


def _in_this_process(path: str) -> Run:
    function: AgentFunction = load_object(path, "env.args.agent")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"env.args.agent={path!r} is {function!r:.60}, no `async def agent(task, client)`. Write one, or give "
            "the words of a command: env.args.agent=[python, my_agent.py]."
        )
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"env.args.agent={path!r} needs the client library: pip install 'penstock[envs]', or use a command."
        ) from error

    async def run(task: Task, access: EndpointAccess) -> RewardResult | None:
        async with open_client(access) as client:
            return await function(task, client)

    return run


def open_client(access: EndpointAccess) -> AsyncOpenAI:
    """The official client of a session; closed by `async with`."""
    import openai

    # The endpoint is on this machine and speaks plain HTTP: no proxy, and no certificates, which are slow to load.
    http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, http_client=http)


def without_proxy() -> dict[str, str]:
    """Variables with which a program's requests to this machine, where the endpoint is, bypass proxies."""
    no_proxy = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, [no_proxy, "127.0.0.1,localhost,::1"])))


async def _run_command(command: Sequence[str], task: Task, access: EndpointAccess) -> RewardResult | None:
    """Run a program to its end, and keep the tail of its output. Cancelling the call kills the program.

    Returns:
        The reward in its last line: a number or an object of numbers; None if it is neither.

    Raises:
        RuntimeError: If it cannot be started, or its exit code is not 0; with the tail of its output.
    """
    variables = {**without_proxy(), **variables_for(access)}
    words = words_for(command, task)
    with tempfile.TemporaryFile() as given:
        fields = {"task_id": task.task_id, "prompt": task.prompt, "fields": dict(task.fields)}
        given.write(json.dumps(fields, default=str).encode() + b"\n")
        given.flush()
        try:
            process = subprocess.Popen(  # noqa: ASYNC220  it only starts here; the wait for it is asynchronous
                words,
                stdin=subprocess.DEVNULL,
                pass_fds=[given.fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **variables, "PENSTOCK_TASK": f"/dev/fd/{given.fileno()}"},
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"the agent {command[0]!r} cannot be started: {error.strerror}") from None
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = bytearray(), bytearray()
    reading = asyncio.gather(_keep_tail(process.stdout, out), _keep_tail(process.stderr, err))
    try:
        await _ended(process.pid)
    finally:
        # Kill it and its descendants that parentage or process group can find. The rest ends with the environment
        # process (workers/supervisor.py).
        process_tree.kill_descendants(process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):  # a daemon may hold its output open
            await asyncio.wait_for(reading, _OUTPUT_TIMEOUT_S)
    if process.returncode != 0:
        output = (bytes(err) or bytes(out)).decode(errors="replace").strip()
        raise RuntimeError(f"the agent {how_it_ended(process.returncode)}: {output[-2000:]}")
    return parse_reward(bytes(out).decode(errors="replace"))


def variables_for(access: EndpointAccess) -> dict[str, str]:
    """Variables in which clients of OpenAI and of Anthropic look for address and key."""
    return {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": access.api_key,
        "ANTHROPIC_MODEL": access.model,
    }


def words_for(command: Sequence[str], task: Task) -> list[str]:
    """The words of a command, with the task's prompt, as a person would type it, and its id."""
    prompt = task.prompt if isinstance(task.prompt, str) else "\n\n".join(one["content"] for one in task.prompt)
    values = {"{prompt}": prompt, "{task_id}": task.task_id}
    # In one pass: a prompt may spell `{task_id}` itself.
    return [re.sub(r"\{prompt\}|\{task_id\}", lambda found: values[found.group()], word) for word in command]


def parse_reward(output: str) -> RewardResult | None:
    """The last line with text, if it is a JSON number or an object of numbers."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        return None
    if _is_number(value):
        return float(value)
    if isinstance(value, dict) and value and all(map(_is_number, value.values())):
        return {name: float(part) for name, part in value.items()}
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


async def _ended(pid: int) -> None:
    """Wait until a child process exits, without reaping it."""
    loop, pidfd, is_over = asyncio.get_running_loop(), os.pidfd_open(pid), asyncio.Event()
    loop.add_reader(pidfd, is_over.set)
    try:
        await is_over.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _keep_tail(pipe: IO[bytes], tail: bytearray) -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        while data := await reader.read(1 << 16):
            tail += data
            del tail[:-_TAIL_BYTES]
    finally:
        transport.close()
