"""The exact tokens of one thread of a trajectory: p, y_1, o_1, y_2, o_2, … y_n.

p is the prompt, y_k what the policy sampled in turn k as the engine gave it, o_k the observation behind it, rendered
once. The request of turn k + 1 is exactly p, y_1, o_1 … y_k, o_k, so what the trainer sees is what the engines saw. The
loss mask is 1 on y_k and 0 elsewhere, behavior logprobs are 0 elsewhere, spans cover the y_k only (I4, I7). An
observation after which nothing is sampled is left out. A fork has all of it so far as its p: mask 0, for these tokens
carry their loss where they were sampled (docs/concepts/threads.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.ports import SamplingParams
from penstock.dataflow.trajectory import MAIN_THREAD, Episode, Task, Thread, Trajectory, Turn
from penstock.dataflow.versions import Span, concatenate_spans, join_spans
from penstock.envs.reasoning import Spoken
from penstock.rollout.partial import PartialTurn

SampleTurn = Callable[[PartialTurn], Awaitable[None]]
"""Samples one turn to its end, whatever engines it takes."""


@dataclass(frozen=True, slots=True)
class EpisodeBudget:
    """When an episode ends although the environment did not say so.

    Attributes:
        max_turns: Turns of the policy, over all threads.
        max_tokens: Of prompt, turns and observations of one thread together.
        max_threads: More are an error of the environment.
    """

    max_turns: int
    max_tokens: int
    max_threads: int = 1


class Dialogue:
    """Grows turn by turn.

    Args:
        prompt_ids: What it begins with.
        opening: Text of that; of a fork, of what is new in it.
        name: Of the thread.
        fork_of: Whose tokens `prompt_ids` begins with.
        floor: Oldest version that may begin its first turn; -1 is any.

    Attributes:
        turns: Finished ones.
        num_interruptions: Of all turns.
        token_ids: All of it.
        loss_mask: Of each token, whether it was sampled here.
        logprobs: Behavior logprob of each token; 0 where not sampled.
        spans: Version spans of the sampled ones.
    """

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        opening: str,
        name: str = MAIN_THREAD,
        fork_of: str | None = None,
        floor: int = -1,
    ) -> None:
        self.turns: list[Turn] = []
        self.num_interruptions = 0
        self.name = name
        self.opening = opening
        self._fork_of = fork_of
        self._floor = floor
        self.token_ids: tuple[int, ...] = prompt_ids
        self.loss_mask = [False] * len(prompt_ids)
        self.logprobs = [0.0] * len(prompt_ids)
        self.spans: list[Span] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def last_token(self) -> int:
        """Of the last turn, behind which an observation goes."""
        return self.token_ids[-1]

    @property
    def newest_text(self) -> str:
        """What was said last, which the next turn goes on from."""
        return self.turns[-1].observation if self.turns else self.opening

    def fork(self, name: str, token_ids: tuple[int, ...], opening: str) -> Dialogue:
        """A thread that begins with all of this one, then `token_ids`."""
        return Dialogue((*self.token_ids, *token_ids), opening, name, self.name, self.spans[-1].version)

    def next_turn(self, sampling: SamplingParams, max_tokens: int) -> PartialTurn:
        """What is sampled next; `max_tokens` bounds the whole dialogue."""
        room = max_tokens - self.num_tokens
        assert room > 0, "asked for with room for a token"
        return PartialTurn(
            self.token_ids,
            replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)),
            num_interruptions=self.num_interruptions,
            floor=self.spans[-1].version if self.spans else self._floor,
        )

    def sampled(self, partial: PartialTurn, spoken: Spoken) -> None:
        """Keep a finished turn, as it came."""
        assert partial.prompt_ids == self.token_ids, "a turn goes on from all tokens before it, unchanged"
        assert partial.finish_reason is not None, "it ended"
        self.token_ids += partial.token_ids
        self.loss_mask += [True] * partial.num_tokens
        self.logprobs += partial.logprobs
        self.spans += partial.spans
        interruptions = partial.num_interruptions - self.num_interruptions
        self.num_interruptions = partial.num_interruptions
        self.turns.append(
            Turn(
                spoken.answer,
                partial.finish_reason,
                partial.num_tokens,
                num_interruptions=interruptions,
                thread=self.name,
                reasoning=spoken.reasoning,
            )
        )

    def observed(self, token_ids: tuple[int, ...], text: str) -> None:
        """Put an observation behind the last turn."""
        self.token_ids += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.turns[-1] = replace(self.turns[-1], observation=text, num_observation_tokens=len(token_ids))

    def thread(self) -> Thread:
        """What describes it in a trajectory."""
        return Thread(self.name, self.num_tokens, self.opening, self._fork_of)


def joined(dialogues: Sequence[Dialogue], task: Task, trajectory_id: TrajectoryId, episode: Episode) -> Trajectory:
    """All threads of an episode, one after another, as the trainer gets them."""
    is_ordinary = [one.name for one in dialogues] == [MAIN_THREAD]
    return Trajectory(
        trajectory_id=trajectory_id,
        task_id=task.task_id,
        token_ids=np.concatenate([np.array(one.token_ids, np.int32) for one in dialogues]),
        loss_mask=np.concatenate([np.array(one.loss_mask, np.bool_) for one in dialogues]),
        behavior_logprobs=np.concatenate([np.array(one.logprobs, np.float32) for one in dialogues]),
        spans=concatenate_spans([join_spans(one.spans) for one in dialogues]),
        prompt=dialogues[0].opening,
        response="".join(turn.response for turn in episode.turns),
        reasoning="".join(turn.reasoning for turn in episode.turns),
        finish_reason="stop" if episode.end == "done" else "length",
        episode=episode,
        threads=() if is_ordinary else tuple(one.thread() for one in dialogues),
    )
