"""Plays one episode: the policy says something, the environment answers, until it is done or a budget runs out.

Consumes: a task with an environment. Waits for: the turns that are sampled, one or several at the same time, then the
environment. Unblocked by: the trajectory runner; the environment's reply, or its time-out. No engine slot is held while
the environment thinks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Protocol

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.ports import SamplingParams
from penstock.dataflow.trajectory import Episode, EpisodeEnd, Task, Trajectory
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.threads import take_turns
from penstock.envs.workers.episode_host import PlayedEpisode
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import EpisodeBudget, PartialTurn, SampleTurn, joined
from penstock.rollout.trajectory.recording import Recording
from penstock.rollout.trajectory.threads import Threads


class EpisodeSource(Protocol):
    """Where episodes are played (envs/workers/episode_host.py)."""

    def open(self, task: Task) -> AbstractAsyncContextManager[PlayedEpisode]: ...


class EpisodePlayer:
    """Plays episodes of any task whose environment `source` knows.

    Args:
        source: Where they are played.
        codec: Text and tokens of the policy.
        budget: Of each episode.
        endpoint: Where agent programs ask; None where there are none.
    """

    def __init__(
        self, source: EpisodeSource, codec: TokenCodec, budget: EpisodeBudget, endpoint: Endpoint | None = None
    ) -> None:
        self._source = source
        self.endpoint = endpoint
        self._codec = codec
        self._budget = budget

    async def play(
        self, task: Task, trajectory_id: TrajectoryId, sampling: SamplingParams, sample: SampleTurn
    ) -> Trajectory:
        """Play one episode.

        Raises:
            TrajectoryError: kind `env`, if the environment raises or hangs, or the prompt leaves no room; and whatever
                `sample` raises.
        """
        async with self._source.open(task) as played:
            reply = await played.reset()
            if reply.get("runs_itself"):
                recording = Recording(self._codec, self._budget, sampling, sample)
                return await self._run(task, trajectory_id, played, recording)
            threads, replies = Threads(task, self._codec, self._budget, sampling), []
            end: EpisodeEnd | None = threads.listen(reply)
            while end is None:
                await _sample_all([turn for _, turn in threads.speaking], sample)
                reply = await take_turns(played, reply, threads.spoken())
                replies.append(reply)
                end = threads.listen(reply)
        reward = sum(reply.get("reward", 0.0) for reply in replies)
        parts = _summed([reply.get("parts", {}) for reply in replies])
        counts = _summed([reply.get("counts", {}) for reply in replies])
        episode = Episode(threads.turns, end, reward, parts, counts)
        return joined([*threads.dialogues.values()], task, trajectory_id, episode)

    async def _run(
        self, task: Task, trajectory_id: TrajectoryId, played: PlayedEpisode, recording: Recording
    ) -> Trajectory:
        """Let an agent program play; one that a budget has cut off may end as it likes."""
        assert self.endpoint is not None, "tasks of agent programs come with an endpoint"
        async with self.endpoint.open(task.task_id) as session:
            try:
                reply = await session.serve(played.run(session.access), recording)
            except TrajectoryError as error:
                if error.kind != "env" or recording.overrun is None:
                    raise
                reply = {}
        return recording.trajectory(task, trajectory_id, reply, session.counts_as_floats())


def _summed(over_turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What the environment gave, or counted, by name."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, value in chain.from_iterable(one.items() for one in over_turns):
        sums[name] += value
    return dict(sums)


async def _sample_all(turns: Sequence[PartialTurn], sample: SampleTurn) -> None:
    """Sample turns at the same time; the first failure ends the others."""
    if len(turns) == 1:
        await sample(turns[0])
        return
    try:
        async with asyncio.TaskGroup() as group:
            for turn in turns:
                group.create_task(sample(turn))  # type: ignore[arg-type]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
