"""Where episodes are played: processes that can be killed, below the process that drives the run.

User code may block, and a step that blocks in the driver's event loop would hold up every trajectory and the trainer.
So no environment runs there, trusted or not: one crossing costs a fraction of a millisecond, a turn of the policy much
more. Each episode has its own thread in a process (episode_child.py).

What goes wrong is a `TrajectoryError` of kind `env`, never a reward. A call that raises costs its own episode. A call
that hangs costs its own episode: its process gets no new ones, plays the others to their end, and is then killed. Only
a process that dies costs all the episodes it had; they are repeated within the retry budget. One that does not load in
the middle of a run costs those that waited for it.

Consumes: calls of trajectories. Waits for: the process's reply. Unblocked by: it, the time-out, or the process's end.
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
from penstock.dataflow.trajectory import Task
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
        """After a reply that said several things: the turns behind them, in that order."""
        ...

    async def run(self, access: EndpointAccess) -> EpisodeReply:
        """Of an environment that runs itself: play it to its end, without a time-out."""
        ...


class _Worker:
    """One process and what it plays.

    Attributes:
        episodes: Open ones.
        stuck: Episodes that did not answer in time, and have not closed since.
        end: How it ended, if it has.
        starting: Loads the environments. Raises ConfigError if they do not load, OSError if the machine cannot start
            the process now; either is its end.
    """

    def __init__(self, spec: ChildSpec, startup_timeout_s: float) -> None:
        self.process = ChildProcess(spec, self._on_reply, self._on_exit)
        self.episodes: set[int] = set()
        self.stuck: set[int] = set()
        self.end: str | None = None
        self.starting = asyncio.create_task(self._start(startup_timeout_s))
        self._calls: dict[int, asyncio.Future[EpisodeReply]] = {}

    async def _start(self, timeout_s: float) -> None:
        try:
            await self.process.start(timeout_s)
        except Exception:
            self.end = "did not start"
            self.process.kill()
            raise

    @property
    def is_usable(self) -> bool:
        return self.end is None and not self.stuck

    def send(self, call_id: int, body: bytes) -> asyncio.Future[EpisodeReply]:
        future: asyncio.Future[EpisodeReply] = asyncio.get_running_loop().create_future()
        if self.end is not None:
            future.set_result({"error": f"its process {self.end}"})
            return future
        self._calls[call_id] = future
        self.process.write(encode_frame(call_id, body))
        return future

    def kill(self) -> None:
        if self.end is None:
            self.end = "was ended"
            self.starting.cancel()
            self.process.kill()
            self._fail_calls()

    def _on_reply(self, call_id: int, reply: EpisodeReply) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def _on_exit(self, process: ChildProcess) -> None:
        self.end = process.end()
        self._fail_calls()

    def _fail_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_result({"error": f"its process {self.end}"})


class EpisodeHost:
    """Plays episodes in `num_workers` processes. Use it from one event loop, and close it.

    Args:
        env: Where environments come from.
        seed: As given to the task source.
    """

    def __init__(self, env: EnvConfig, seed: int) -> None:
        self._limits: EpisodeConfig = env.episode
        factories = {name: config.model_dump(mode="json") for name, config in stream_factories(env).items()}
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
        """Processes that live."""
        return [worker.process.pid for worker in self._workers if worker.end is None]

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[PlayedEpisode]:
        """One episode of `task`; it is closed whatever happens, and nobody waits for that.

        Raises:
            ConfigError: If the environments do not load, and never have.
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
        except Exception as error:  # noqa: BLE001  user data: whatever its pickling raises is data
            return {"error": f"the task cannot be sent: {error!r}"}
        body = pickle.dumps((episode, method, packed), protocol=pickle.HIGHEST_PROTOCOL)
        try:
            async with asyncio.timeout(timeout_s):
                return await worker.send(next(self._serial), body)
        except TimeoutError:
            assert timeout_s is not None, "only then it can be over"
            worker.stuck.add(episode)
            return {"error": f"timed out after {timeout_s:g} s (env.episode.timeout_s)"}

    def _choose(self) -> _Worker:
        """The usable process with the fewest episodes; a new one while there are too few."""
        self._workers = [worker for worker in self._workers if worker.end is None]
        usable = [worker for worker in self._workers if worker.is_usable]
        if len(usable) < self._limits.num_workers:
            usable.append(_Worker(self._spec, self._limits.startup_timeout_s))
            self._workers.append(usable[-1])
        return min(usable, key=lambda worker: len(worker.episodes))

    async def _ready(self, worker: _Worker) -> None:
        """Environments that have loaded before are not to blame if they do not now: that costs an episode, no run."""
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
        if worker.end is None and worker.process.is_serving:
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
"""What a well-formed reply to a call has, of which there must be one."""


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
            said = f"its process answered {reply!r:.200}; expected {' or '.join(_ANSWERS[method])}"
            raise TrajectoryError("env", f"{method} of {self._task.task_id}: {said}")
        return reply
