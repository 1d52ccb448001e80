"""Plays episodes in killable child processes of the driver.

User code may block, and a step that blocks in the driver's event loop would delay every trajectory and the trainer. So
no environment runs there, trusted or not: a call to another process takes a fraction of a millisecond, much less than a
turn of the policy. Each episode has its own thread in a process (episode_child.py).

Every failure is a `TrajectoryError` of kind `env`, never a reward. A call that raises fails its own episode. So does a
call that hangs: its process gets no new episodes, plays the others to their end, and is then killed. If a process dies,
all its episodes fail; they are repeated within the retry budget. If a process fails to load during a run, the episodes
that wait for it fail.

Consumes: calls of trajectories. Waits for: the process's reply. Unblocked by: the reply, the time-out, or the process's
exit.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig, EpisodeConfig
from penstock.envs.environment import Action, EndpointAccess
from penstock.envs.streams import stream_factories
from penstock.envs.workers.child_process import ChildProcess, ChildSpec
from penstock.envs.workers.episode_child import EpisodeReply, is_episode_hello, is_episode_reply
from penstock.envs.workers.permissions import grants_of_episodes
from penstock.envs.workers.reward_child import encode_frame


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


class _Worker:
    """One process and its episodes.

    Attributes:
        episodes: Open episodes.
        stuck: Episodes that did not answer in time, and have not closed since.
        how_it_ended: None while it runs.
        starting: Loads the environments. Raises ConfigError if they do not load, OSError if the machine cannot start
            the process now; the process has ended in either case.
    """

    def __init__(self, spec: ChildSpec, startup_timeout_s: float) -> None:
        self.process = ChildProcess(spec, self._on_reply, self._on_exit)
        self.episodes: set[int] = set()
        self.stuck: set[int] = set()
        self.how_it_ended: str | None = None
        self.starting = asyncio.create_task(self._start(startup_timeout_s))
        self._calls: dict[int, asyncio.Future[EpisodeReply]] = {}

    async def _start(self, timeout_s: float) -> None:
        try:
            await self.process.start(timeout_s)
        except Exception:
            self.how_it_ended = "did not start"
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

    def kill(self) -> None:
        if self.how_it_ended is None:
            self.how_it_ended = "was ended"
            self.starting.cancel()
            self.process.kill()
            self._fail_calls()

    def _on_reply(self, call_id: int, reply: EpisodeReply) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def _on_exit(self, process: ChildProcess) -> None:
        self.how_it_ended = process.end()
        self._fail_calls()

    def _fail_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_result({"error": f"its process {self.how_it_ended}"})


class EpisodeHost:
    """Plays episodes in `num_workers` processes. Use it from one event loop, and close it.

    Args:
        env: Configuration of the environments.
        seed: Seed of the task source.
    """

    def __init__(self, env: EnvConfig, seed: int) -> None:
        self._limits: EpisodeConfig = env.episode
        factories = {
            name: config.model_dump(mode="json", exclude={"python"}) for name, config in stream_factories(env).items()
        }
        self._spec = ChildSpec(
            f"env.factory={env.factory!r}",
            "env.episode",
            "penstock.envs.workers.episode_child",
            [json.dumps(factories), str(seed)],
            env.episode.max_memory_gib,
            env.episode.max_processes,
            grants_of_episodes(env),
            is_episode_hello,
            is_episode_reply,
            env.python,
        )
        self._workers: list[_Worker] = []
        self._has_loaded = False
        self._serial = itertools.count(1)
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def timeout_s(self) -> float:
        """Longest time for one call."""
        return self._limits.timeout_s

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [worker.process.pid for worker in self._workers if worker.how_it_ended is None]

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[PlayedEpisode]:
        """Open an episode of `task`. It is always closed afterwards, in the background.

        Raises:
            ConfigError: If the environments do not load, and have never loaded.
            TrajectoryError: kind `env`, if a process cannot be started now; the next episode tries again.
        """
        worker, episode = self._choose(), next(self._serial)
        worker.episodes.add(episode)
        try:
            await self._ready(worker)
            yield _Episode(self, worker, episode, task)
        finally:
            closing = asyncio.create_task(self._end(worker, episode))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all processes with everything they started."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def call(
        self, worker: _Worker, episode: int, method: str, argument: Any, timeout_s: float | None
    ) -> EpisodeReply:
        """One call of one episode, within the time-out."""
        try:
            packed = pickle.dumps(argument, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  user data: an error of its pickling fails the episode
            return {"error": f"the task cannot be sent: {error!r}"}
        body = pickle.dumps((episode, method, packed), protocol=pickle.HIGHEST_PROTOCOL)
        try:
            async with asyncio.timeout(timeout_s):
                return await worker.send(next(self._serial), body)
        except TimeoutError:
            assert timeout_s is not None, "without a limit there is no time-out"
            worker.stuck.add(episode)
            return {"error": f"timed out after {timeout_s:g} s (env.episode.timeout_s)"}

    def _choose(self) -> _Worker:
        """The usable process with the fewest episodes; starts a new one while there are fewer than `num_workers`."""
        self._workers = [worker for worker in self._workers if worker.how_it_ended is None]
        usable = [worker for worker in self._workers if worker.is_usable]
        if len(usable) < self._limits.num_workers:
            usable.append(_Worker(self._spec, self._limits.startup_timeout_s))
            self._workers.append(usable[-1])
        return min(usable, key=lambda worker: len(worker.episodes))

    async def _ready(self, worker: _Worker) -> None:
        """Wait until a process has loaded. If environments have loaded before, a failure costs one episode only."""
        try:
            await asyncio.shield(worker.starting)
        except ConfigError as error:
            if not self._has_loaded:
                raise
            raise TrajectoryError("env", " ".join(error.violations)) from error
        except OSError as error:
            what = f"{self._spec.label}: its process cannot be started: {type(error).__name__}: {error}"
            raise TrajectoryError("env", what) from error
        self._has_loaded = True

    async def _end(self, worker: _Worker, episode: int) -> None:
        if worker.how_it_ended is None and worker.process.is_serving:
            was_stuck = episode in worker.stuck
            if "closed" in await self.call(worker, episode, "close", None, self.timeout_s):
                worker.stuck.discard(episode)
            elif not was_stuck:
                worker.stuck.add(episode)
        worker.episodes.discard(episode)
        if worker.stuck and not worker.episodes:
            worker.kill()


_TURNS = ("content", "several", "done")
_ANSWERS = {"reset": ("content", "several", "runs_itself"), "step": _TURNS, "step_all": _TURNS, "run": ("done",)}
"""Method -> keys of which a well-formed reply has at least one."""


class _Episode:
    def __init__(self, host: EpisodeHost, worker: _Worker, episode: int, task: Task) -> None:
        self._host = host
        self._worker = worker
        self._episode = episode
        self._task = task

    async def reset(self) -> EpisodeReply:
        return await self._call("reset", self._task, self._host.timeout_s)

    async def step(self, action: Action) -> EpisodeReply:
        return await self._call("step", action, self._host.timeout_s)

    async def step_all(self, actions: Sequence[Action]) -> EpisodeReply:
        return await self._call("step_all", list(actions), self._host.timeout_s)

    async def run(self, access: EndpointAccess) -> EpisodeReply:
        return await self._call("run", access, None)

    async def _call(self, method: str, argument: Any, timeout_s: float | None) -> EpisodeReply:
        reply = await self._host.call(self._worker, self._episode, method, argument, timeout_s)
        if "error" in reply:
            raise TrajectoryError("env", f"{method} of {self._task.task_id}: {reply['error']}")
        if not any(name in reply for name in _ANSWERS[method]):
            problem = f"its process answered {reply!r:.200}; expected {' or '.join(_ANSWERS[method])}"
            raise TrajectoryError("env", f"{method} of {self._task.task_id}: {problem}")
        return reply
