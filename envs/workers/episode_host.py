"""Plays episodes in killable child processes of the driver.

User code may block, and a step that blocks in the driver's event loop would delay every trajectory and the trainer. So
no environment runs there, trusted or not: a call to another process takes a fraction of a millisecond, much less than a
turn of the policy. Each environment has its own thread in a process (episode_child.py). When it is opened and closed,
and how many episodes it plays, is decided by its pool (environment_pool.py).

Every failure is a `TrajectoryError` of kind `env`, never a reward. A call that raises fails its own episode. So does a
call that hangs: its process gets no new episodes, plays the others to their end, and is then killed. If a process dies,
all its episodes fail; they are repeated within the retry budget. If a process fails to load during a run, the episodes
that wait for it fail.

Consumes: calls of trajectories. Waits for: an environment, then the process's reply. Unblocked by: the pool; the reply,
the time-out, or the process's exit.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig
from penstock.envs.environment import Action, EndpointAccess
from penstock.envs.streams import MAIN, stream_factories
from penstock.envs.workers.child_process import ChildProcess, ChildSpec
from penstock.envs.workers.environment_pool import EnvironmentPool, Usage, UsageMeter
from penstock.envs.workers.episode_child import EpisodeReply, is_episode_hello, is_episode_reply
from penstock.envs.workers.permissions import grants_of_episodes
from penstock.envs.workers.reward_child import encode_frame

CLOSING_S = 10.0
"""Longest time for closing environments at the end of a run, or `env.episode.timeout_s` if that is less."""


class PlayedEpisode(Protocol):
    """One episode as the trajectory runner sees it; every method raises `TrajectoryError` of kind `env`."""

    async def reset(self) -> EpisodeReply: ...

    async def step(self, action: Action) -> EpisodeReply: ...

    async def step_all(self, actions: Sequence[Action]) -> EpisodeReply:
        """Send the turns of a reply with several observations, in their order."""
        ...

    async def run(self, access: EndpointAccess) -> EpisodeReply:
        """Run an agent program to its end, without a time-out."""
        ...

    async def cut_off(self) -> EpisodeReply:
        """End an agent program at a budget of the episode; returns what its environment makes of it so far."""
        ...


class _Worker:
    """One process and its environments.

    Attributes:
        environments: Numbers of those that are not closed.
        stuck: Numbers of those that did not answer in time, and have not closed since.
        is_retired: One of them does not close either. It is killed when the others are closed.
        how_it_ended: None while it runs.
        ended: Set at its end.
        starting: Loads the environments. Raises ConfigError if they do not load, OSError if the machine cannot start
            the process now; the process has ended in either case.

    Args:
        spec: Of its process.
        startup_timeout_s: Longest time for loading.
        on_lost: Called when its idle environments are of no more use: it has ended, or is retired.
    """

    def __init__(self, spec: ChildSpec, startup_timeout_s: float, on_lost: Callable[[], None]) -> None:
        self.process = ChildProcess(spec, self._on_reply, self._on_exit)
        self.environments: set[int] = set()
        self.stuck: set[int] = set()
        self.is_retired = False
        self.how_it_ended: str | None = None
        self.ended = asyncio.Event()
        self.starting = asyncio.create_task(self._start(startup_timeout_s))
        self._on_lost = on_lost
        self._calls: dict[int, asyncio.Future[EpisodeReply]] = {}

    async def _start(self, timeout_s: float) -> None:
        try:
            await self.process.start(timeout_s)
        except Exception:
            self._end("did not start")
            self.process.kill()
            raise

    @property
    def is_usable(self) -> bool:
        return self.how_it_ended is None and not self.stuck

    def send(self, call_id: int, body: bytes) -> asyncio.Future[EpisodeReply]:
        future: asyncio.Future[EpisodeReply] = asyncio.get_running_loop().create_future()
        if self.how_it_ended is not None:
            future.set_result({"error": f"its process {self.how_it_ended}"})
            return future
        self._calls[call_id] = future
        self.process.write(encode_frame(call_id, body))
        return future

    def retire(self) -> None:
        """Have it take no further episodes."""
        self.is_retired = True
        self._on_lost()

    def kill(self) -> None:
        if self.how_it_ended is None:
            self.starting.cancel()
            self.process.kill()
            self._end("was ended")

    def _on_reply(self, call_id: int, reply: EpisodeReply) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def _on_exit(self, process: ChildProcess) -> None:
        self._end(process.end())

    def _end(self, how: str) -> None:
        self.how_it_ended = how
        self.ended.set()
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_result({"error": f"its process {how}"})
        self._on_lost()


@dataclass(eq=False, slots=True)
class _OpenEnvironment:
    """One environment in its process, from its opening to its close."""

    worker: _Worker
    number: int
    """Its name in frames."""
    is_reusable: bool = False
    """What it says when it is open."""
    num_episodes: int = 0
    """Episodes for which it was taken."""
    is_settled: bool = True
    """No call of an episode is running or has failed."""

    @property
    def is_usable(self) -> bool:
        return self.worker.how_it_ended is None and not self.worker.is_retired


class EpisodeHost:
    """Plays episodes in `num_workers` processes. Use it from one event loop, and close it.

    Attributes:
        meter: Measures the use of its environments.

    Args:
        env: Configuration of the environments.
        seed: Seed of the task source.
    """

    def __init__(self, env: EnvConfig, seed: int) -> None:
        self.meter = UsageMeter()
        self._limits = env.episode
        factories = stream_factories(env)
        self._limits_of = {kind: config.episode for kind, config in factories.items()}
        as_json = {kind: config.model_dump(mode="json", exclude={"python"}) for kind, config in factories.items()}
        self._spec = ChildSpec(
            f"env.factory={env.factory!r}",
            "env.episode",
            "penstock.envs.workers.episode_child",
            [json.dumps(as_json), str(seed)],
            env.episode.max_memory_gib,
            env.episode.max_processes,
            grants_of_episodes(env),
            is_episode_hello,
            is_episode_reply,
            env.python,
        )
        self._workers: list[_Worker] = []
        self._pools: dict[str, EnvironmentPool[_OpenEnvironment]] = {}  # by the name of their task source
        self._has_loaded = False
        self._serial = itertools.count(1)

    @property
    def timeout_s(self) -> float:
        """Longest time for one call."""
        return self._limits.timeout_s

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [worker.process.pid for worker in self._workers if worker.how_it_ended is None]

    def usage(self) -> Usage:
        """What the environments did so far."""
        return self.meter.read()

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[PlayedEpisode]:
        """Open an episode of `task`. Its environment is closed afterwards, in the background, or plays another one.

        Raises:
            ConfigError: If the environments do not load, and have never loaded.
            TrajectoryError: kind `env`, if the environment cannot be opened, or is not free in time.
        """
        pool = self._pool(task.environment or MAIN)
        try:
            environment = await pool.take()
        except TrajectoryError as error:
            raise TrajectoryError("env", f"open of {task.task_id}: {error.detail}") from error
        has_ended_well = False
        try:
            yield _Episode(self, environment, task)
            has_ended_well = True
        finally:
            pool.give_back(environment, is_sound=has_ended_well and environment.is_settled)

    async def close(self) -> None:
        """Close the environments, and end all processes with everything they started."""
        pools, limit_s = self._pools.values(), min(CLOSING_S, self.timeout_s)
        await asyncio.gather(*(pool.close(limit_s) for pool in pools))
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(pool.close(limit_s) for pool in pools))
        self._workers.clear()
        self._pools.clear()

    async def call(
        self,
        environment: _OpenEnvironment,
        method: str,
        argument: Any,
        timeout_s: float | None,
        key: str = "timeout_s",
    ) -> EpisodeReply:
        """One call of one environment, within a time-out, which is `key` of `env.episode`."""
        try:
            packed = pickle.dumps(argument, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  user data: an error of its pickling fails the episode
            return {"error": f"the task cannot be sent: {error!r}"}
        body = pickle.dumps((environment.number, method, packed), protocol=pickle.HIGHEST_PROTOCOL)
        try:
            async with asyncio.timeout(timeout_s):
                return await environment.worker.send(next(self._serial), body)
        except TimeoutError:
            assert timeout_s is not None, "without a limit there is no time-out"
            environment.worker.stuck.add(environment.number)
            return {"error": f"timed out after {timeout_s:g} s (env.episode.{key})"}

    def _pool(self, kind: str) -> EnvironmentPool[_OpenEnvironment]:
        if kind not in self._pools:
            limits = self._limits_of.get(kind, self._limits)
            opening = partial(self._open, kind)
            self._pools[kind] = EnvironmentPool(limits, self.meter, self._new, opening, self._close)
        return self._pools[kind]

    def _new(self) -> _OpenEnvironment:
        """An environment in the usable process with the fewest; starts a process while there are too few."""
        self._workers = [worker for worker in self._workers if worker.how_it_ended is None]
        usable = [worker for worker in self._workers if worker.is_usable]
        if len(usable) < self._limits.num_workers:
            usable.append(_Worker(self._spec, self._limits.startup_timeout_s, self._close_unusable))
            self._workers.append(usable[-1])
        worker = min(usable, key=lambda worker: len(worker.environments))
        environment = _OpenEnvironment(worker, next(self._serial))
        worker.environments.add(environment.number)
        return environment

    async def _open(self, kind: str, environment: _OpenEnvironment) -> None:
        """Open an environment. If environments have loaded before, a failure costs one episode only.

        Raises:
            ConfigError: If the environments do not load, and have never loaded.
            TrajectoryError: kind `env`, if it cannot be opened.
        """
        try:
            await asyncio.shield(environment.worker.starting)
        except ConfigError as error:
            if not self._has_loaded:
                raise
            raise TrajectoryError("env", " ".join(error.violations)) from error
        except OSError as error:
            what = f"{self._spec.label}: its process cannot be started: {type(error).__name__}: {error}"
            raise TrajectoryError("env", what) from error
        self._has_loaded = True
        reply = await self.call(environment, "open", kind, self._limits.startup_timeout_s, "startup_timeout_s")
        if "opened" not in reply:
            raise TrajectoryError("env", reply.get("error") or f"its process answered {reply!r:.200}; expected opened")
        environment.is_reusable = reply.get("reusable", False)

    async def _close(self, environment: _OpenEnvironment) -> None:
        """Close an environment, or wait for the end of its process, which is killed when its others are closed."""
        worker, number, is_closed = environment.worker, environment.number, True
        if worker.how_it_ended is None and worker.process.is_serving:
            is_closed = "closed" in await self.call(environment, "close", None, self.timeout_s)
            if is_closed:
                worker.stuck.discard(number)
            else:
                worker.stuck.add(number)
                worker.retire()
        worker.environments.discard(number)
        if worker.stuck and not worker.environments:
            worker.kill()
        if not is_closed:
            await worker.ended.wait()

    def _close_unusable(self) -> None:
        for pool in self._pools.values():
            pool.close_unusable()


_TURNS = ("content", "several", "done")
_ANSWERS = {
    "reset": ("content", "several", "runs_itself"),
    "step": _TURNS,
    "step_all": _TURNS,
    "run": ("done",),
    "cut_off": ("done",),
}
"""Method -> keys of which a well-formed reply has at least one."""


class _Episode:
    def __init__(self, host: EpisodeHost, environment: _OpenEnvironment, task: Task) -> None:
        self._host = host
        self._environment = environment
        self._task = task

    async def reset(self) -> EpisodeReply:
        return await self._call("reset", self._task, self._host.timeout_s)

    async def step(self, action: Action) -> EpisodeReply:
        return await self._call("step", action, self._host.timeout_s)

    async def step_all(self, actions: Sequence[Action]) -> EpisodeReply:
        return await self._call("step_all", list(actions), self._host.timeout_s)

    async def run(self, access: EndpointAccess) -> EpisodeReply:
        return await self._call("run", access, None)

    async def cut_off(self) -> EpisodeReply:
        return await self._call("cut_off", None, self._host.timeout_s)

    async def _call(self, method: str, argument: Any, timeout_s: float | None) -> EpisodeReply:
        self._environment.is_settled = False
        with self._host.meter.busy.one():
            reply = await self._host.call(self._environment, method, argument, timeout_s)
        if "error" in reply:
            raise TrajectoryError("env", f"{method} of {self._task.task_id}: {reply['error']}")
        if not any(name in reply for name in _ANSWERS[method]):
            problem = f"its process answered {reply!r:.200}; expected {' or '.join(_ANSWERS[method])}"
            raise TrajectoryError("env", f"{method} of {self._task.task_id}: {problem}")
        self._environment.is_settled = True
        return reply
