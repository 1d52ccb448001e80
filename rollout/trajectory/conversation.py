"""The exact tokens of one thread of a trajectory: p, y_1, o_1, y_2, o_2, … y_n.

p is the prompt, y_k what the policy sampled in turn k as the engine gave it, o_k the observation behind it, rendered
once. The request of turn k + 1 is exactly p, y_1, o_1 … y_k, o_k, so what the trainer sees is what the engines saw. The
loss mask is 1 on y_k and 0 elsewhere, behavior logprobs are 0 elsewhere, spans cover the y_k only (I4, I7). An
observation after which nothing is sampled is left out. A fork has all of it so far as its p: mask 0, for these tokens
carry their loss where they were sampled (docs/concepts/threads.md).

A turn may be interrupted. Of one that has m = `max_new_tokens` and n tokens so far, the request for the rest is all
tokens up to the n-th, with m − n new ones. A causal model draws the next from the same distribution whether it sampled
those before itself or was given them, so nothing but time is lost (docs/concepts/partial-rollouts.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from penstock.dataflow.ids import RequestId, TrajectoryId
from penstock.dataflow.ports import GenerateRequest, SamplingParams, TokenDelta
from penstock.dataflow.trajectory import MAIN_THREAD, Episode, FinishReason, Task, Thread, Trajectory, Turn
from penstock.dataflow.versions import Span, Spans, concatenate_spans, first_tokens, join_spans
from penstock.envs.reasoning import Spoken


@dataclass(slots=True)
class PartialTurn:
    """Tokens of a turn received so far, delta by delta. They are never sampled again.

    Attributes:
        min_start_version: Oldest version that may begin it: the newest that sampled an earlier turn of its thread, the
            oldest of the episode so far; -1 is any.
        on_delta: Called with each delta when it is kept; may `cut`.
        num_tokens: Sampled so far.
        resumed_with: Tokens it had when it was last resumed; 0 if it never was.
        num_interruptions: So far, those of earlier turns included.
        is_cut: It was ended before its engine ended it.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    min_start_version: int = -1
    on_delta: Callable[[TokenDelta], None] | None = None
    num_tokens: int = 0
    resumed_with: int = 0
    num_interruptions: int = 0
    finish_reason: FinishReason | None = None
    is_cut: bool = False
    _deltas: list[TokenDelta] = field(default_factory=list)

    def joined(self) -> TokenDelta:
        """All that was sampled, as if it had come at once."""
        deltas = self._deltas
        return TokenDelta(
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
            join_spans([span for delta in deltas for span in delta.spans]),
            self.finish_reason,
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All sampled ids, in order."""
        return self.joined().token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Behavior logprob of each."""
        return self.joined().logprobs

    @property
    def spans(self) -> Spans:
        """Version spans of all of them."""
        return self.joined().spans

    def remaining(self) -> int:
        """Tokens it may still sample."""
        return self.sampling.max_new_tokens - self.num_tokens

    def min_version(self) -> int:
        """Oldest version that may go on with it (I4): that of its newest token, before the first its floor."""
        return next(
            (delta.spans[-1].version for delta in reversed(self._deltas) if delta.spans), self.min_start_version
        )

    def extend(self, delta: TokenDelta) -> None:
        """Keep what an engine reported; `is_cut` says whether that is enough, and the engine is to stop."""
        self._deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        if self.on_delta is not None:
            self.on_delta(delta)

    def request(self, request_id: RequestId) -> GenerateRequest:
        """Ask for all of it, or for what is missing."""
        if not self.num_tokens:
            return GenerateRequest(request_id, self.prompt_ids, self.sampling)
        prompt = (*self.prompt_ids, *self.token_ids)
        return GenerateRequest(request_id, prompt, replace(self.sampling, max_new_tokens=self.remaining()))

    def settle(self) -> bool:
        """After an interruption: say whether nothing is missing, because only the engine's last word was lost."""
        self.finish_reason = None
        if self.num_tokens and self.token_ids[-1] in self.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif self.remaining() <= 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def cut(self, num_tokens: int) -> None:
        """End it behind its first `num_tokens` tokens: they are on-policy if the rule looked at these alone."""
        logprobs = self.logprobs[:num_tokens]
        self._deltas = [TokenDelta(self.token_ids[:num_tokens], logprobs, first_tokens(self.spans, num_tokens))]
        self.num_tokens, self.finish_reason, self.is_cut = num_tokens, "stop", True


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


class Conversation:
    """Grows turn by turn.

    Args:
        prompt_ids: What it begins with.
        opening: Text of that; of a fork, of what is new in it.
        sampling: Of its turns.
        name: Of the thread.
        is_chat: What it hears goes through the chat template, as its prompt did.
        fork_of: The thread whose tokens `prompt_ids` begins with.

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
        sampling: SamplingParams,
        name: str = MAIN_THREAD,
        *,
        is_chat: bool = False,
        fork_of: Conversation | None = None,
    ) -> None:
        self.turns: list[Turn] = []
        self.num_interruptions = 0
        self.name = name
        self.opening = opening
        self.is_chat = is_chat
        self.sampling = sampling
        self._fork_of = None if fork_of is None else fork_of.name
        self._min_version = -1 if fork_of is None else fork_of.spans[-1].version
        self.token_ids: tuple[int, ...] = prompt_ids
        self.loss_mask = [False] * len(prompt_ids)
        self.logprobs = [0.0] * len(prompt_ids)
        self.spans: list[Span] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def newest_text(self) -> str:
        """What was said last, which the next turn goes on from."""
        return self.turns[-1].observation if self.turns else self.opening

    def next_turn(self, max_tokens: int, max_new_tokens: int | None = None) -> PartialTurn:
        """What is sampled next; `max_tokens` bounds the whole dialogue, `max_new_tokens` the turn."""
        room = max_tokens - self.num_tokens
        assert room > 0, "asked for with room for a token"
        longest = min(self.sampling.max_new_tokens, max_new_tokens or self.sampling.max_new_tokens, room)
        return PartialTurn(
            self.token_ids,
            replace(self.sampling, max_new_tokens=longest),
            num_interruptions=self.num_interruptions,
            min_start_version=self.spans[-1].version if self.spans else self._min_version,
        )

    def sampled(self, partial: PartialTurn, spoken: Spoken) -> None:
        """Keep a finished turn, as it came."""
        assert partial.prompt_ids == self.token_ids, "a turn goes on from all tokens before it, unchanged"
        assert partial.finish_reason is not None, "it ended"
        answer = partial.joined()
        self.token_ids += answer.token_ids
        self.loss_mask += [True] * partial.num_tokens
        self.logprobs += answer.logprobs
        self.spans += answer.spans
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


def joined(
    dialogues: Sequence[Conversation], task: Task, trajectory_id: TrajectoryId, episode: Episode | None = None
) -> Trajectory:
    """The trajectory as the trainer gets it: all threads of an episode, one after another, or a single turn."""
    is_ordinary = [one.name for one in dialogues] == [MAIN_THREAD]
    turns = dialogues[0].turns if episode is None else episode.turns
    is_whole = turns[-1].finish_reason == "stop" if episode is None else episode.end == "done"
    return Trajectory(
        trajectory_id=trajectory_id,
        task_id=task.task_id,
        token_ids=np.concatenate([np.array(one.token_ids, np.int32) for one in dialogues]),
        loss_mask=np.concatenate([np.array(one.loss_mask, np.bool_) for one in dialogues]),
        behavior_logprobs=np.concatenate([np.array(one.logprobs, np.float32) for one in dialogues]),
        spans=concatenate_spans([join_spans(one.spans) for one in dialogues]),
        prompt=dialogues[0].opening,
        response="".join(turn.response for turn in turns),
        reasoning="".join(turn.reasoning for turn in turns),
        finish_reason="stop" if is_whole else "length",
        episode=episode,
        threads=() if is_ordinary else tuple(one.thread() for one in dialogues),
    )
