"""Plays one episode: the policy says something, the environment answers, until it is done or a budget runs out.

Consumes: a task with an environment. Waits for: the turn that is sampled, then the environment. Unblocked by: the
trajectory runner; the environment's reply, or its time-out. No engine slot is held while the environment thinks.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import Protocol, cast

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.ports import SamplingParams
from penstock.dataflow.trajectory import Episode, EpisodeEnd, Task, Trajectory
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.environment import Action, Observation, Role
from penstock.envs.episode_child import EpisodeReply
from penstock.envs.episode_host import PlayedEpisode
from penstock.rollout.dialogue import Dialogue, EpisodeBudget, SampleTurn
from penstock.rollout.partial import PartialTrajectory
from penstock.rollout.recording import Recording
from penstock.rollout.tokenizers import TokenCodec


class EpisodeSource(Protocol):
    """Where episodes are played (envs/episode_host.py)."""

    def open(self, task: Task) -> AbstractAsyncContextManager[PlayedEpisode]: ...


class _Takings:
    """What the environment gave and counted over the turns."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.parts: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def add(self, reply: EpisodeReply) -> None:
        self.reward += reply.get("reward", 0.0)
        for name, value in reply.get("parts", {}).items():
            self.parts[name] += value  # type: ignore[assignment]  # a Counter of floats
        for name, value in reply.get("counts", {}).items():
            self.counts[name] += value  # type: ignore[assignment]


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
        self._endpoint = endpoint
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
            began = await played.reset()
            if began.get("runs_itself"):
                recording = Recording(self._codec, self._budget, sampling, sample)
                return await self._run(task, trajectory_id, played, recording)
            opening = began["content"]
            dialogue = Dialogue(self._codec.encode_prompt(opening))
            prompt = self._codec.decode(self._codec.encode_prompt(opening))
            self._check_room(task, dialogue)
            takings = _Takings()
            end: EpisodeEnd = "max_turns"
            for turn in range(self._budget.max_turns):
                partial = dialogue.next_turn(sampling, self._budget.max_tokens)
                await sample(partial)
                text = self._codec.decode(partial.token_ids)
                dialogue.sampled(partial, text)
                reply = await played.step(Action(text, is_truncated=partial.finish_reason != "stop", turn=turn))
                takings.add(reply)
                if reply.get("done"):
                    end = "done"
                    break
                if turn + 1 < self._budget.max_turns and not self._observe(dialogue, partial, opening, reply):
                    end = "max_tokens"
                    break
        episode = Episode(tuple(dialogue.turns), end, takings.reward, dict(takings.parts), dict(takings.counts))
        return dialogue.trajectory(task, trajectory_id, prompt, episode)

    async def _run(
        self, task: Task, trajectory_id: TrajectoryId, played: PlayedEpisode, recording: Recording
    ) -> Trajectory:
        """Let an agent program play; one that a budget has cut off may end as it likes."""
        assert self._endpoint is not None, "tasks of agent programs come with an endpoint"
        async with self._endpoint.open(task.task_id) as session:
            try:
                reply = await session.serve(played.run(session.access), recording)
            except TrajectoryError as error:
                if error.kind != "env" or recording.overrun is None:
                    raise
                reply = {}
        return recording.trajectory(task, trajectory_id, reply, session.counts_as_floats())

    def _observe(
        self, dialogue: Dialogue, partial: PartialTrajectory, opening: str | list[dict[str, str]], reply: EpisodeReply
    ) -> bool:
        """Append what the environment said, if a further token fits behind it; says whether."""
        said = Observation(reply["content"], cast("Role", reply["role"]))
        content = said.text if isinstance(opening, str) else said.messages
        token_ids = self._codec.encode_observation(content, partial.token_ids[-1])
        if dialogue.num_tokens + len(token_ids) >= self._budget.max_tokens:
            return False
        dialogue.observed(token_ids, self._codec.decode(token_ids))
        return True

    def _check_room(self, task: Task, dialogue: Dialogue) -> None:
        if dialogue.num_tokens >= self._budget.max_tokens:
            raise TrajectoryError(
                "env",
                f"reset of {task.task_id}: the prompt has {dialogue.num_tokens} tokens, the budget of the episode is "
                f"{self._budget.max_tokens} (env.episode.max_tokens), so nothing could be sampled",
            )
