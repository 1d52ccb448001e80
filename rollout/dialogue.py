"""The exact tokens of one multi-turn trajectory: p, y_1, o_1, y_2, o_2, … y_n.

p is the prompt, y_k what the policy sampled in turn k as the engine gave it, o_k the observation behind it, rendered
once. The request of turn k + 1 is exactly p, y_1, o_1 … y_k, o_k, so what the trainer sees is what the engines saw. The
loss mask is 1 on y_k and 0 elsewhere, behavior logprobs are 0 elsewhere, spans cover the y_k only (I4, I7). An
observation after which nothing is sampled is left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.ports import SamplingParams
from penstock.dataflow.trajectory import Episode, Task, Trajectory, Turn
from penstock.dataflow.versions import Span, join_spans
from penstock.rollout.partial import PartialTrajectory

SampleTurn = Callable[[PartialTrajectory], Awaitable[None]]
"""Samples one turn to its end, whatever engines it takes."""


@dataclass(frozen=True, slots=True)
class EpisodeBudget:
    """When an episode ends although the environment did not say so.

    Attributes:
        max_turns: Turns of the policy.
        max_tokens: Of prompt, turns and observations together.
    """

    max_turns: int
    max_tokens: int


class Dialogue:
    """Grows turn by turn.

    Attributes:
        turns: Finished ones.
        num_interruptions: Of all turns.
    """

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self.turns: list[Turn] = []
        self.num_interruptions = 0
        self._token_ids: tuple[int, ...] = prompt_ids
        self._loss_mask = [False] * len(prompt_ids)
        self._logprobs = [0.0] * len(prompt_ids)
        self._spans: list[Span] = []

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def next_turn(self, sampling: SamplingParams, max_tokens: int) -> PartialTrajectory:
        """What is sampled next; `max_tokens` bounds the whole dialogue."""
        room = max_tokens - self.num_tokens
        assert room > 0, "asked for with room for a token"
        return PartialTrajectory(
            self._token_ids,
            replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)),
            num_interruptions=self.num_interruptions,
            floor=self._spans[-1].version if self._spans else -1,
        )

    def sampled(self, partial: PartialTrajectory, response: str) -> None:
        """Keep a finished turn, as it came."""
        assert partial.prompt_ids == self._token_ids, "a turn goes on from all tokens before it, unchanged"
        assert partial.finish_reason is not None, "it ended"
        self._token_ids += partial.token_ids
        self._loss_mask += [True] * partial.num_tokens
        self._logprobs += partial.logprobs
        self._spans += partial.spans
        interruptions = partial.num_interruptions - self.num_interruptions
        self.num_interruptions = partial.num_interruptions
        self.turns.append(Turn(response, partial.finish_reason, partial.num_tokens, num_interruptions=interruptions))

    def observed(self, token_ids: tuple[int, ...], text: str) -> None:
        """Put an observation behind the last turn."""
        self._token_ids += token_ids
        self._loss_mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self.turns[-1] = replace(self.turns[-1], observation=text, num_observation_tokens=len(token_ids))

    def trajectory(self, task: Task, trajectory_id: TrajectoryId, prompt: str, episode: Episode) -> Trajectory:
        """All of it, as the trainer gets it."""
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            token_ids=np.array(self._token_ids, np.int32),
            loss_mask=np.array(self._loss_mask, np.bool_),
            behavior_logprobs=np.array(self._logprobs, np.float32),
            spans=join_spans(self._spans),
            prompt=prompt,
            response="".join(turn.response for turn in episode.turns),
            finish_reason="stop" if episode.end == "done" else "length",
            episode=episode,
        )
