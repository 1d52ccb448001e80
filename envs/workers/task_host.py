"""The tasks of a source that only the interpreter of `env.python` can import, asked of a process of it (task_child.py).

One process per configuration serves every reader of the driver: the checks, the evaluation and the training stream. It
starts with the first reader, and ends with the driver.

Consumes: calls of the driver. Waits for: the process's reply, in the caller's thread, as for a source of ours.
Unblocked by: the reply or the time-out. If the process dies, another one is asked once more, and continues every
stream at its place, since a seed always gives the same tasks.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig
from penstock.envs.workers.child_process import ChildProcess, ChildSpec
from penstock.envs.workers.permissions import grants_of_episodes
from penstock.envs.workers.reward_child import encode_frame
from penstock.envs.workers.task_child import TaskReply, is_task_reply, to_json, to_task


class HostedTasks:
    """A task source in another interpreter. It has the optional methods that the source has (`task_child.OFFERED`).

    Args:
        config: The source, with `python`; `episode` limits its process.
        seed: Seed of the task source.

    Raises:
        ConfigError: If the interpreter cannot run it, or the source does not load there.
    """

    def __init__(self, config: EnvConfig, seed: int) -> None:
        self._process = _process_of(config.model_dump_json(include={"factory", "args", "python", "episode"}))
        self._seed = seed
        for name in self._process.call("open", seed)["offers"]:
            setattr(self, name, functools.partial(self._call, name))

    def train(self) -> Iterator[Task]:
        """As the task source."""
        return self._tasks("train")

    def held_out(self, num_tasks: int) -> list[Task]:
        """As the task source."""
        return list(self._tasks("held_out", num_tasks))

    def _tasks(self, method: str, *arguments: Any) -> Iterator[Task]:
        stream, num_read = next(_streams), 0
        while True:
            reply = self._process.call("tasks", self._seed, method, arguments, stream, num_read)
            yield from map(to_task, reply["tasks"])
            num_read += len(reply["tasks"])
            if reply["is_over"]:
                return

    def _call(self, method: str, task: Task) -> Any:
        return self._process.call("call", self._seed, method, to_json(task))["returned"]


_streams = itertools.count(1)
_MAX_ATTEMPTS = 2
"""Processes that may die of one call."""


@functools.cache
def _process_of(config: str) -> _TaskProcess:
    return _TaskProcess(EnvConfig.model_validate_json(config))


class _TaskProcess:
    """A process that answers one call after the other, of any thread. It is handled in a thread of its own, since some
    callers are in an event loop, which cannot wait for another task of its own.
    """

    def __init__(self, config: EnvConfig) -> None:
        self._timeout_s = config.episode.startup_timeout_s
        self._spec = ChildSpec(
            f"env.factory={config.factory!r} in env.python={config.python}",
            "env.episode",
            "penstock.envs.workers.task_child",
            [config.model_dump_json(exclude={"python"})],
            config.episode.max_memory_gib,
            config.episode.max_processes,
            grants_of_episodes(config),
            is_task_reply,
            is_task_reply,
            config.python,
        )
        self._one_call = threading.Lock()
        self._process: ChildProcess | None = None
        self._call_id = 0
        self._waiting: asyncio.Future[TaskReply | str] | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="tasks", daemon=True).start()
        atexit.register(self.close)

    def call(self, *request: Any) -> TaskReply:
        """Ask the process.

        Raises:
            ConfigError: If it cannot be started, does not answer in time or ends, and as the source raises it.
            ValueError: As the source raises it.
            RuntimeError: If the source raises anything else.
        """
        with self._one_call:
            for _ in range(_MAX_ATTEMPTS):
                reply = asyncio.run_coroutine_threadsafe(self._ask(request), self._loop).result()
                if not isinstance(reply, str):
                    break
        if isinstance(reply, str):
            what = " ".join(str(part) for part in request[:3] if isinstance(part, str))
            raise ConfigError(f"{self._spec.label}: its process {reply}, asked for {what}, {_MAX_ATTEMPTS} times.")
        if "violations" in reply:
            raise ConfigError([f"{one} (in env.python={self._spec.python})" for one in reply["violations"]])
        if "refused" in reply:
            raise ValueError(reply["refused"])
        if "error" in reply:
            raise RuntimeError(f"in env.python={self._spec.python}: {reply['error']}")
        return reply

    def close(self) -> None:
        """End the process; the next call starts another one."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.sleep(0)  # for the task that reads from it

    async def _ask(self, request: tuple[Any, ...]) -> TaskReply | str:
        """The reply, or how the process ended.

        Raises:
            ConfigError: If it does not answer in time.
        """
        if self._process is None:
            process = ChildProcess(self._spec, self._on_reply, self._on_exit)
            try:
                await process.start(self._timeout_s)
            except BaseException:
                process.kill()
                raise
            self._process = process
        self._call_id, self._waiting = self._call_id + 1, self._loop.create_future()
        self._process.write(encode_frame(self._call_id, json.dumps(request).encode()))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._waiting
        except TimeoutError:
            await self._end()
            what = " ".join(str(part) for part in request[:3] if isinstance(part, str))
            raise ConfigError(
                f"{self._spec.label}: {what} took longer than {self._timeout_s:g} s (env.episode.startup_timeout_s)."
            ) from None

    def _on_reply(self, call_id: int, reply: TaskReply) -> None:
        if call_id == self._call_id:
            self._settle(reply)

    def _on_exit(self, process: ChildProcess) -> None:
        self._process = None
        self._settle(process.end())

    def _settle(self, reply: TaskReply | str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(reply)
