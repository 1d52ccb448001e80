"""Plays one episode: the policy acts and the environment answers, until it is done or a budget is exhausted.

Consumes: a task with an environment. Waits for: the sampled turns, one or several concurrently, then the environment.
Unblocked by: the trajectory runner; the reply or the time-out of the environment. No engine slot is held while the
environment works.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import chain

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Episode, EpisodeEnd, Trajectory
from penstock.envs.config import TrainedThreads
from penstock.envs.endpoint.answer_parser import AnswerParser, HermesParser
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.endpoint.session import Answer, AnswerTurn, Exchange
from penstock.envs.threads import take_turns
from penstock.envs.workers.environment_pool import Seconds, Usage
from penstock.envs.workers.episode_host import PlayedEpisode
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import EpisodeBudget, PartialTurn, SampleTurn, build_trajectory
from penstock.rollout.trajectory.recording import Recording
from penstock.rollout.trajectory.threads import Threads

OpenEpisode = Callable[[Task], AbstractAsyncContextManager[PlayedEpisode]]
"""Opens an episode in an environment worker (envs/workers/episode_host.py)."""
ChooseParser = Callable[[], Awaitable[AnswerParser]]


class EpisodePlayer:
    """Plays episodes of tasks that have an environment.

    Args:
        open_episode: Opens episodes.
        codec: Tokenizer and chat template of the policy.
        budget: Limits of each episode.
        endpoint: Endpoint for agent programs; None if there are none.
        threads: Which threads of an agent program are trained.
        usage: What the environments did so far.
    """

    def __init__(
        self,
        open_episode: OpenEpisode,
        codec: TokenCodec,
        budget: EpisodeBudget,
        endpoint: Endpoint | None = None,
        threads: TrainedThreads = "agent",
        usage: Callable[[], Usage] = Usage,
    ) -> None:
        self._open_episode = open_episode
        self.endpoint = endpoint
        self._codec = codec
        self._budget = budget
        self._threads = threads
        self._choose_parser: ChooseParser | None = None
        self._parser: AnswerParser | None = None
        self._choosing = asyncio.Lock()
        self._usage = usage
        self._waiting = Seconds()
        self._newest = Usage()

    def read_calls_by(self, choose: ChooseParser) -> None:
        """Choose who reads the tool calls of the policy when the next agent program runs; at first it is Hermes."""
        self._choose_parser, self._parser = choose, None

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the environments since the last call. An agent program that waits for the policy is not busy."""
        usage, before = self._usage(), self._newest
        self._newest = usage = replace(usage, busy_s=usage.busy_s - self._waiting.read())
        return usage.metrics_since(before)

    async def play(
        self, task: Task, trajectory_id: TrajectoryId, sampling: SamplingParams, sample: SampleTurn
    ) -> Trajectory:
        """Play one episode.

        Raises:
            TrajectoryError: kind `env`, if the environment raises or hangs, or the prompt exceeds the budget; errors of
                `sample` propagate.
        """
        async with self._open_episode(task) as played:
            reply = await played.reset()
            if reply.get("runs_itself"):
                parser = await self._chosen_parser()
                recording = Recording(self._codec, self._budget, sampling, sample, self._threads, parser)
                return await self._run(task, trajectory_id, played, recording)
            threads, replies = Threads(task, self._codec, self._budget, sampling), []
            end: EpisodeEnd | None = threads.receive(reply)
            while end is None:
                await _sample_all([turn for _, turn in threads.pending_turns], sample)
                reply = await take_turns(played, reply, threads.take_actions())
                replies.append(reply)
                end = threads.receive(reply)
        reward = sum(reply.get("reward", 0.0) for reply in replies)
        parts = _summed([reply.get("parts", {}) for reply in replies])
        counts = _summed([reply.get("counts", {}) for reply in replies])
        episode = Episode(threads.turns, end, reward, parts, counts, reply.get("answer"))
        return build_trajectory([*threads.conversations.values()], task, trajectory_id, episode)

    async def _chosen_parser(self) -> AnswerParser:
        async with self._choosing:
            if self._parser is None:
                self._parser = HermesParser() if self._choose_parser is None else await self._choose_parser()
        return self._parser

    async def _run(
        self, task: Task, trajectory_id: TrajectoryId, played: PlayedEpisode, recording: Recording
    ) -> Trajectory:
        """Run an agent program. Where a limit of ours has cut it off, its error does not fail the trajectory: long
        attempts would be repeated until a short one came. If it fails after a turn that was not sampled, that is why.
        """
        assert self.endpoint is not None, "agent programs need an endpoint"
        async with self.endpoint.open(task.task_id) as session:
            is_cut = False
            try:
                reply = await session.serve(played.run(session.access), self._timed(recording.answer))
            except TrajectoryError as error:
                if error.kind != "env":
                    raise
                if recording.cut_off is None and not session.is_over_budget:
                    if recording.failure is not None:
                        raise recording.failure from error
                    raise
                reply, is_cut = await played.cut_off(), True
        counts = {**reply.get("counts", {}), **session.counts_as_floats()}
        return recording.trajectory(task, trajectory_id, reply, counts, is_cut=is_cut)

    def _timed(self, answer: AnswerTurn) -> AnswerTurn:
        """Measure the time in which a program waits for at least one answer."""
        num_requests = 0

        async def timed(exchange: Exchange) -> Answer:
            nonlocal num_requests
            num_requests += 1
            self._waiting.change(int(num_requests == 1))
            try:
                return await answer(exchange)
            finally:
                num_requests -= 1
                self._waiting.change(-int(num_requests == 0))

        return timed


def _summed(over_turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum values by name over all turns."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, value in chain.from_iterable(one.items() for one in over_turns):
        sums[name] += value
    return dict(sums)


async def _sample_all(turns: Sequence[PartialTurn], sample: SampleTurn) -> None:
    """Sample turns concurrently; the first failure cancels the others."""
    if len(turns) == 1:
        await sample(turns[0])
        return
    try:
        async with asyncio.TaskGroup() as group:
            for turn in turns:
                group.create_task(sample(turn))  # type: ignore[arg-type]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
