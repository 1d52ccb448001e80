"""Episodes of environments on several nodes of a joined cluster: a Ray actor per node around `EpisodeHost`.

Agent programs talk to the endpoint of the driver, which listens on the driver's machine only. So the first episodes
are played there, and all of them if an environment runs itself. Processes and limits of environments are divided among
the nodes: each has a pool of its own (environment_pool.py).

Consumes: calls of trajectories. Waits for: the reply of the environment's node. Unblocked by: the reply, the time-out
of the environment with a margin, or the loss of the node, which fails the episode (kind `env`); nodes that are lost, or
where the environments do not load, get no further episodes.
"""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.ray_errors import answer_of
from penstock.actors.worker_log import keep_output
from penstock.dataflow.errors import ConfigError, PenstockError, TrajectoryError
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig, EpisodeConfig, StreamConfig
from penstock.envs.environment import Action, EndpointAccess
from penstock.envs.streams import stream_factories
from penstock.envs.workers.child_process import MAX_LOADS
from penstock.envs.workers.environment_pool import Usage
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.envs.workers.episode_host import EpisodeHost, PlayedEpisode

logger = logging.getLogger(__name__)

CONCURRENCY = 100_000
"""Above the number of pending calls: further calls would wait inside the actor."""
MARGIN_S = 30.0
"""How much longer than the time-out of the environment an answer may take: the actor reports that time-out itself."""

Failure = TrajectoryError | ConfigError


class EpisodeActor:
    """The environment processes of one node. Failures are returned, so that Ray does not wrap them."""

    def __init__(self, env: EnvConfig, seed: int) -> None:
        keep_output("environments")
        self._host = EpisodeHost(env, seed)
        self._open: dict[int, tuple[AsyncExitStack, PlayedEpisode] | None] = {}  # None: it is being opened

    async def open(self, key: int, task: bytes) -> Failure | Usage:
        """Open an episode of a pickled task; returns why it cannot be opened, or what the environments did so far."""
        episode, self._open[key] = AsyncExitStack(), None
        try:
            played = await episode.enter_async_context(self._host.open(pickle.loads(task)))  # noqa: S301 - of our driver
        except (TrajectoryError, ConfigError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
            what = "the task cannot be unpickled on the node of the environment"
            return TrajectoryError("env", f"{what}: {type(error).__name__}: {error}")
        if key not in self._open:  # the driver gave it up meanwhile
            await episode.aclose()
            return TrajectoryError("env", "the episode was closed while it was being opened")
        self._open[key] = episode, played
        return self._host.usage()

    async def call(self, key: int, method: str, arguments: Sequence[Any]) -> EpisodeReply | Failure:
        """Call a method of an open episode."""
        opened = self._open[key]
        assert opened is not None, "called after `open` has answered"
        try:
            reply: EpisodeReply = await getattr(opened[1], method)(*arguments)
        except (TrajectoryError, ConfigError) as error:
            return error
        return reply

    async def close(self, key: int, *, has_ended_well: bool) -> None:
        """Close an episode, also one that is still being opened."""
        if (opened := self._open.pop(key, None)) is None:
            return
        # An episode that failed or was cancelled leaves its context by an error, as on the driver's machine.
        error = None if has_ended_well else TrajectoryError("env", "its episode did not end")
        await opened[0].__aexit__(None if error is None else type(error), error, None)

    async def shutdown(self) -> None:
        """End all processes."""
        await self._host.close()


class DriverEpisodes:
    """Episodes on the driver's machine.

    Attributes:
        num_workers: Its environment processes.
        failure: Why no further episode is opened here: there is no reason.
    """

    failure = ""

    def __init__(self, env: EnvConfig, seed: int) -> None:
        self._host = EpisodeHost(env, seed)
        self.num_workers = env.episode.num_workers
        self.open = self._host.open
        self.close = self._host.close
        self.usage = self._host.usage


class RemoteEpisodes:
    """Episodes on another node, whose actor starts with the first one.

    Attributes:
        num_workers: Its environment processes.
        failure: Why no further episode is opened there; empty if there is no reason.
    """

    def __init__(self, name: str, env: EnvConfig, start: Callable[[], ActorHandle]) -> None:
        self.num_workers = env.episode.num_workers
        self.failure = ""
        self._name = name
        self._limits = env.episode
        self._has_queue = any(one.episode.max_open is not None for one in stream_factories(env).values())
        self._start = start
        self._actor: ActorHandle | None = None
        self._keys = itertools.count()
        self._num_open = 0  # or waiting for an environment
        self._usage = Usage()

    def usage(self) -> Usage:
        """What its environments had done when the newest episode was opened."""
        return self._usage

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[PlayedEpisode]:
        """Open an episode of `task`.

        Raises:
            TrajectoryError: kind `env`, if the task cannot be sent, or the environments do not load there.
        """
        try:
            body = pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TrajectoryError("env", f"{task.task_id} cannot be sent to another node: {error!r}") from error
        if self._actor is None:
            self._actor = self._start()
        actor, key, has_ended_well = self._actor, next(self._keys), False
        self._num_open += 1
        # Loading the environments; opening one, after those before it in the queue, where each has its own limits.
        num_before = self._num_open * self._has_queue
        limit_s = (MAX_LOADS + 1 + num_before) * self._limits.startup_timeout_s + MARGIN_S
        limit_s += num_before * self._limits.wait_timeout_s
        try:
            usage: Usage = await self.answer(actor.open.remote(key, body), limit_s, f"open {task.task_id}")
            self._usage = max(self._usage, usage, key=lambda one: one.episodes)
            yield _RemoteEpisode(self, actor, key, self._limits.timeout_s + MARGIN_S)
            has_ended_well = True
        finally:
            self._num_open -= 1
            with suppress(ray.exceptions.RayError):
                actor.close.remote(key, has_ended_well=has_ended_well)

    async def answer(self, call: Any, limit_s: float, what: str) -> Any:
        """The answer to a call of an episode.

        Raises:
            TrajectoryError: kind `env`.
        """
        what = f"environments on {self._name}: {what}"
        try:
            answer = await answer_of(call, limit_s, PenstockError, what)
        except PenstockError as lost:
            self.failure = str(lost)
            raise TrajectoryError("env", str(lost)) from lost
        if isinstance(answer, ConfigError):  # they load on the driver's machine, or the run would not have begun
            self.failure = f"{what}: {' '.join(answer.violations)}"
            raise TrajectoryError("env", self.failure)
        if isinstance(answer, TrajectoryError):
            raise answer
        return answer

    async def close(self) -> None:
        """End the environment processes of the node."""
        if self._actor is not None:
            with suppress(PenstockError):
                await answer_of(self._actor.shutdown.remote(), MARGIN_S, PenstockError, "environments: shutdown")
            ray.kill(self._actor)


class _RemoteEpisode:
    def __init__(self, node: RemoteEpisodes, actor: ActorHandle, key: int, timeout_s: float) -> None:
        self._node = node
        self._actor = actor
        self._key = key
        self._timeout_s = timeout_s

    async def reset(self) -> EpisodeReply:
        return await self._call("reset")

    async def step(self, action: Action) -> EpisodeReply:
        return await self._call("step", action)

    async def step_all(self, actions: Sequence[Action]) -> EpisodeReply:
        return await self._call("step_all", list(actions))

    async def run(self, access: EndpointAccess) -> EpisodeReply:  # noqa: ARG002 - of `PlayedEpisode`
        raise AssertionError("programs run on the driver's machine")

    async def cut_off(self) -> EpisodeReply:
        raise AssertionError("programs run on the driver's machine")

    async def _call(self, method: str, *arguments: Any) -> EpisodeReply:
        call = self._actor.call.remote(self._key, method, arguments)
        reply: EpisodeReply = await self._node.answer(call, self._timeout_s, method)
        return reply


class SpreadEpisodes:
    """Episodes on several nodes: an episode is opened where there are the fewest per process."""

    def __init__(self, nodes: Sequence[DriverEpisodes | RemoteEpisodes]) -> None:
        """Play on these nodes; the first one is the driver's machine."""
        self._nodes = nodes
        self._num_open = dict.fromkeys(range(len(nodes)), 0)
        self._runs_itself: bool | None = None
        self._told: set[int] = set()

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[PlayedEpisode]:
        """Open an episode of `task`; as `EpisodeHost.open`."""
        index = self._choose()
        self._num_open[index] += 1
        try:
            async with self._nodes[index].open(task) as played:
                yield _FirstReply(played, self, is_here=index == 0)
        finally:
            self._num_open[index] -= 1
            if self._nodes[index].failure and index not in self._told:
                self._told.add(index)
                logger.warning("%s. No more episodes are played there", self._nodes[index].failure.rstrip("."))

    def usage(self) -> Usage:
        """What the environments did so far, on all nodes."""
        return sum((node.usage() for node in self._nodes), Usage())

    async def close(self) -> None:
        for node in self._nodes:
            await node.close()

    def learn(self, *, runs_itself: bool) -> None:
        """Remember whether an environment has run itself."""
        self._runs_itself = self._runs_itself or runs_itself

    def _choose(self) -> int:
        usable = [index for index, node in enumerate(self._nodes) if not node.failure]
        if self._runs_itself is not False:  # also while that is not known
            return 0
        return min(usable, key=lambda index: self._num_open[index] / self._nodes[index].num_workers)


class _FirstReply:
    """An episode whose first reply says whether its environment runs itself."""

    def __init__(self, played: PlayedEpisode, source: SpreadEpisodes, *, is_here: bool) -> None:
        self._played = played
        self._source = source
        self._is_here = is_here
        self.step, self.step_all = played.step, played.step_all
        self.run, self.cut_off = played.run, played.cut_off

    async def reset(self) -> EpisodeReply:
        reply = await self._played.reset()
        runs_itself = bool(reply.get("runs_itself"))
        self._source.learn(runs_itself=runs_itself)
        if runs_itself and not self._is_here:
            raise TrajectoryError("env", "it runs itself, so it is played again on the driver's machine")
        return reply


def spread_episodes(env: EnvConfig, seed: int) -> SpreadEpisodes:
    """Spread `env.episode.num_workers` processes over the nodes of the cluster that is joined, the driver's first.

    At most as many nodes are used as environments of any task source may be open.
    """
    here = ray.get_runtime_context().get_node_id()
    for_work = [one for one in ray.nodes() if one["NodeID"] == here or (one["Alive"] and one["Resources"].get("CPU"))]
    alive = sorted(for_work, key=lambda node: node["NodeID"] != here)
    limits = [one.episode.max_open for one in stream_factories(env).values()]
    used = alive[: min([env.episode.num_workers, *(limit for limit in limits if limit is not None)])]
    nodes: list[DriverEpisodes | RemoteEpisodes] = []
    for index, node in enumerate(used):
        of_node = share_of_node(env, index, len(used))
        nodes.append(DriverEpisodes(of_node, seed) if index == 0 else _on_node(node, of_node, seed))
    return SpreadEpisodes(nodes)


def share_of_node(env: EnvConfig, index: int, num_nodes: int) -> EnvConfig:
    """`env` with the share of one of several nodes in `num_workers`, `warm` and `max_open`."""

    def share(total: int) -> int:
        return total // num_nodes + (index < total % num_nodes)

    def limit(of: EpisodeConfig | StreamConfig) -> dict[str, int]:
        return {} if of.max_open is None else {"max_open": share(of.max_open)}

    shares = {"num_workers": share(env.episode.num_workers), "warm": share(env.episode.warm)}
    episode = env.episode.model_copy(update=shares | limit(env.episode))
    streams = {name: stream.model_copy(update=limit(stream)) for name, stream in env.streams.items()}
    return env.model_copy(update={"episode": episode, "streams": streams})


def _on_node(node: dict[str, Any], env: EnvConfig, seed: int) -> RemoteEpisodes:
    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    options = ray.remote(EpisodeActor).options(num_cpus=0, max_concurrency=CONCURRENCY, scheduling_strategy=place)
    return RemoteEpisodes(node["NodeManagerAddress"], env, lambda: options.remote(env, seed))
