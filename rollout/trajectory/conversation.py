"""The exact tokens of one thread of a trajectory: p, y_1, o_1, y_2, o_2, … y_n.

p is the prompt, y_k the tokens that the policy sampled in turn k exactly as the engine returned them, o_k the
observation after them, rendered once. The request of turn k + 1 is exactly p, y_1, o_1 … y_k, o_k, so the trainer sees
what the engines saw. The loss mask is 1 on y_k and 0 elsewhere, behavior logprobs are 0 elsewhere, and spans cover the
y_k only (I4, I7). An observation after the last turn is left out. A fork after turn k begins with p … y_k, with mask 0,
because they carry their loss in the thread that sampled them (docs/guides/several-agents.md).

A turn may be interrupted after n of its m = `max_new_tokens` tokens. The request for the rest has the n tokens appended
to its prompt and asks for m − n new ones. A causal model samples the next token from the same distribution whether it
sampled the tokens before or was given them, so an interruption costs time only (docs/concepts/partial-rollouts.md).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from penstock.dataflow.ids import RequestId, TrajectoryId
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams, derive_seed
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import (
    MAIN_THREAD,
    Alternatives,
    Episode,
    FinishReason,
    Routes,
    Thread,
    Trajectory,
    Turn,
    joined_routes,
    padded_routes,
    unknown_routes,
)
from penstock.dataflow.versions import Span, Spans, concatenate_spans, first_tokens, join_spans
from penstock.envs.reasoning import TurnText


@dataclass(slots=True)
class PartialTurn:
    """The tokens of a turn that have been received so far. They are never sampled again."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    min_start_version: int = -1
    """Oldest version that may start the turn: at least the newest version of earlier turns of its thread, and the
    oldest version of the episode; -1 is any."""
    num_routes: int = 0
    """First tokens of the prompt whose routes are known."""
    on_delta: Callable[[TokenDelta], None] | None = None
    """Called with each delta after it was added; it may call `cut`."""
    num_tokens: int = 0
    """Sampled tokens so far."""
    resumed_with: int = 0
    """Tokens at the last resume; 0 if it was never resumed."""
    num_interruptions: int = 0
    """Interruptions so far, including those of earlier turns."""
    finish_reason: FinishReason | None = None
    is_cut: bool = False
    """The turn was ended by a stop text, before the engine ended it."""
    _deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def deltas(self) -> tuple[TokenDelta, ...]:
        """The deltas that hold tokens."""
        return tuple([delta for delta in self._deltas if delta.token_ids])

    def joined(self) -> TokenDelta:
        """All deltas as one."""
        deltas = self._deltas
        return TokenDelta(
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
            join_spans([span for delta in deltas for span in delta.spans]),
            self.finish_reason,
            Alternatives.joined(delta.alternatives for delta in deltas),
            joined_routes(delta.routes for delta in deltas),
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Sampled token ids."""
        return self.joined().token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Behavior logprobs of the sampled tokens."""
        return self.joined().logprobs

    @property
    def spans(self) -> Spans:
        """Version spans of the sampled tokens."""
        return self.joined().spans

    def remaining(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.sampling.max_new_tokens - self.num_tokens

    def min_version(self) -> int:
        """Oldest version that may continue the turn (I4): that of its newest token, before it `min_start_version`."""
        return next(
            (delta.spans[-1].version for delta in reversed(self._deltas) if delta.spans), self.min_start_version
        )

    def extend(self, delta: TokenDelta) -> None:
        """Add a delta of the engine. Afterwards `is_cut` tells whether the engine should stop."""
        self._deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        if self.on_delta is not None:
            self.on_delta(delta)

    def request(self, request_id: RequestId) -> GenerateRequest:
        """The request for the whole turn, or for its missing tokens."""
        if not self.num_tokens:
            return GenerateRequest(request_id, self.prompt_ids, self.sampling, self.num_routes)
        prompt = (*self.prompt_ids, *self.token_ids)
        known = self.num_routes + sum(len(delta.routes) for delta in self._deltas if delta.routes is not None)
        return GenerateRequest(request_id, prompt, replace(self.sampling, max_new_tokens=self.remaining()), known)

    def finish_if_complete(self) -> bool:
        """Finish an interrupted turn if only the engine's final message was lost. Returns whether it is finished."""
        if self.is_cut:
            return True
        self.finish_reason = None
        if self.num_tokens and self.token_ids[-1] in self.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif self.remaining() <= 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def cut(self, num_tokens: int) -> None:
        """End the turn after its first `num_tokens` tokens.

        They stay on-policy as long as the rule that ends it looks at these tokens only.
        """
        whole = self.joined()
        kept = TokenDelta(
            whole.token_ids[:num_tokens],
            whole.logprobs[:num_tokens],
            first_tokens(whole.spans, num_tokens),
            alternatives=whole.alternatives and whole.alternatives.part(0, num_tokens),
            routes=None if whole.routes is None else whole.routes[: len(whole.routes) - self.num_tokens + num_tokens],
        )
        self._deltas = [kept]
        self.num_tokens, self.finish_reason, self.is_cut = num_tokens, "stop", True


SampleTurn = Callable[[PartialTurn], Awaitable[None]]
"""Samples one turn to its end, over as many engines as needed."""


@dataclass(frozen=True, slots=True)
class EpisodeBudget:
    """Limits that end an episode before the environment does."""

    max_turns: int
    """Turns of the policy over all threads."""
    max_tokens: int
    """Tokens of prompt, turns and observations of one thread."""
    max_threads: int = 1
    """Threads of the episode; more are an error of the environment."""


class TurnEnd(NamedTuple):
    """Number of tokens of a thread at the end of a turn, and the version of the last of them."""

    num_tokens: int
    version: int


class Conversation:
    """The tokens of one thread, extended turn by turn.

    Args:
        prompt_ids: Prompt; of a fork, its tokens after those of the forked thread.
        opening: Text of `prompt_ids`.
        sampling: Sampling parameters of the episode's turns. Each thread has a seed of its own: with equal prompts they
            would sample equal tokens otherwise.
        name: Name of the thread.
        is_chat: Observations are rendered by the chat template, as the prompt was.
        fork_of: Conversation that this one forks.
        num_turns: Turns of `fork_of` with which the fork begins; None: all.

    Attributes:
        turns: Finished turns.
        num_interruptions: Interruptions of all turns.
        token_ids: All tokens.
        loss_mask: For each token, whether it was sampled in this thread.
        logprobs: Behavior logprob of each token; 0 where it was not sampled.
        spans: Version spans of the sampled tokens.
        alternatives: Of the sampled tokens, turn by turn; None where they were sampled from the whole vocabulary.
        routes: Of the first tokens, as far as an engine has computed them; None if none are recorded.
        ends: The end of each turn.
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
        num_turns: int | None = None,
    ) -> None:
        seed = sampling.seed
        if seed is not None and name != MAIN_THREAD:
            sampling = replace(sampling, seed=derive_seed(seed, zlib.crc32(name.encode())))
        self.turns: list[Turn] = []
        self.num_interruptions = 0
        self.name = name
        self.opening = opening
        self.is_chat = is_chat
        self.sampling = sampling
        self.fork_of = fork_of
        self._num_own_prompt = len(prompt_ids)
        self.num_forked_turns = 0 if fork_of is None else len(fork_of.turns) if num_turns is None else num_turns
        before: tuple[int, ...] = ()
        self._min_version = -1
        if fork_of is not None:
            end = fork_of.ends[self.num_forked_turns - 1]
            before, self._min_version = fork_of.token_ids[: end.num_tokens], end.version
        self.ends: list[TurnEnd] = []
        self.token_ids: tuple[int, ...] = before + prompt_ids
        self.loss_mask = [False] * len(self.token_ids)
        self.logprobs = [0.0] * len(self.token_ids)
        self.spans: list[Span] = []
        self.alternatives: list[Alternatives | None] = []
        self.routes: Routes | None = None
        self._turned_at = time.monotonic()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def depth(self) -> int:
        """Turns of its history, those of the threads that it forks included."""
        return len(self.turns) + self.num_turns_before

    @property
    def num_turns_before(self) -> int:
        """Turns of the threads that it forks, with which it begins."""
        above = self.fork_of
        return 0 if above is None else above.num_turns_before + self.num_forked_turns

    def tokens_after(self, num_turns: int) -> tuple[int, ...]:
        """All tokens up to the end of its turn number `num_turns`, counted from 1."""
        return self.token_ids[: self.ends[num_turns - 1].num_tokens]

    @property
    def newest_text(self) -> str:
        """Text of the newest observation, else of the prompt: the next turn continues from it."""
        return self.turns[-1].observation if self.turns else self.opening

    def next_turn(self, max_tokens: int, max_new_tokens: int | None = None) -> PartialTurn:
        """Create the next turn; `max_tokens` limits the whole conversation, `max_new_tokens` the turn."""
        space = max_tokens - self.num_tokens
        assert space > 0, "the caller checks that a token fits"
        self._turned_at = time.monotonic()
        longest = min(self.sampling.max_new_tokens, max_new_tokens or self.sampling.max_new_tokens, space)
        return PartialTurn(
            self.token_ids,
            replace(self.sampling, max_new_tokens=longest),
            num_interruptions=self.num_interruptions,
            min_start_version=self.spans[-1].version if self.spans else self._min_version,
            num_routes=0 if self.routes is None else len(self.routes),
        )

    def add_turn(self, partial: PartialTurn, turn_text: TurnText) -> None:
        """Append a finished turn."""
        assert partial.prompt_ids == self.token_ids, "a turn continues from all earlier tokens, unchanged"
        assert partial.finish_reason is not None, "it ended"
        answer = partial.joined()
        self.token_ids += answer.token_ids
        self.ends.append(TurnEnd(len(self.token_ids), answer.spans[-1].version))
        self.loss_mask += [True] * partial.num_tokens
        self.logprobs += answer.logprobs
        self.spans += answer.spans
        self.alternatives.append(answer.alternatives)
        self.routes = joined_routes([self.routes, answer.routes])
        began_at, self._turned_at = self._turned_at, time.monotonic()
        interruptions = partial.num_interruptions - self.num_interruptions
        self.num_interruptions = partial.num_interruptions
        self.turns.append(
            Turn(
                turn_text.answer,
                partial.finish_reason,
                partial.num_tokens,
                num_interruptions=interruptions,
                thread=self.name,
                reasoning=turn_text.reasoning,
                sampling_s=self._turned_at - began_at,
            )
        )

    def add_observation(self, token_ids: tuple[int, ...], text: str) -> None:
        """Append an observation after the last turn."""
        self.token_ids += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.turns[-1] = replace(
            self.turns[-1],
            observation=text,
            num_observation_tokens=len(token_ids),
            environment_s=time.monotonic() - self._turned_at,
        )

    def end(self) -> None:
        """Leave out an observation after the last turn, whose answer was never completed."""
        if not self.turns:
            return
        num_tokens = self.ends[-1].num_tokens
        self.token_ids = self.token_ids[:num_tokens]
        del self.loss_mask[num_tokens:]
        del self.logprobs[num_tokens:]
        self.turns[-1] = replace(self.turns[-1], observation="", num_observation_tokens=0, environment_s=0.0)

    def path(self) -> list[tuple[Conversation, int]]:
        """The turns of its history, each as the thread that sampled it and its place there."""
        above = [] if self.fork_of is None else self.fork_of.path()[: self.num_turns_before]
        return [*above, *((self, index) for index in range(len(self.turns)))]

    def linear(self) -> Conversation:
        """The same tokens as a thread that forks nothing: the sampled ones of the threads above carry loss, too."""
        if self.fork_of is None:
            return self
        above, num_turns = self.fork_of.linear(), self.num_turns_before
        end = above.ends[num_turns - 1]
        whole = Conversation(self.token_ids, above.opening, self.sampling, self.name, is_chat=self.is_chat)
        whole.loss_mask = above.loss_mask[: end.num_tokens] + self.loss_mask[end.num_tokens :]
        whole.logprobs = above.logprobs[: end.num_tokens] + self.logprobs[end.num_tokens :]
        num_sampled = sum(whole.loss_mask[: end.num_tokens])
        whole.spans = [*first_tokens(join_spans(above.spans), num_sampled), *self.spans]
        whole.alternatives = [*above.alternatives[:num_turns], *self.alternatives]
        whole.routes = self.routes
        whole.ends = [*above.ends[:num_turns], *self.ends]
        *before, last = above.turns[:num_turns]
        last = replace(last, observation=self.opening, num_observation_tokens=self._num_own_prompt)
        whole.turns = [replace(one, thread=self.name) for one in (*before, last, *self.turns)]
        return whole

    def thread(self) -> Thread:
        """Describe it for a trajectory."""
        return Thread(self.name, self.num_tokens, self.opening, None if self.fork_of is None else self.fork_of.name)


def build_trajectory(
    conversations: Sequence[Conversation], task: Task, trajectory_id: TrajectoryId, episode: Episode | None = None
) -> Trajectory:
    """Build the trajectory for the trainer: all threads of an episode one after another, or a single turn."""
    has_main_only = [one.name for one in conversations] == [MAIN_THREAD]
    turns = conversations[0].turns if episode is None else episode.turns
    # An episode that the environment ended on a turn that was cut off has no complete last answer either.
    is_complete = turns[-1].finish_reason == "stop" and (episode is None or episode.end == "done")
    return Trajectory(
        trajectory_id=trajectory_id,
        task_id=task.task_id,
        token_ids=np.concatenate([np.array(one.token_ids, np.int32) for one in conversations]),
        loss_mask=np.concatenate([np.array(one.loss_mask, np.bool_) for one in conversations]),
        behavior_logprobs=np.concatenate([np.array(one.logprobs, np.float32) for one in conversations]),
        spans=concatenate_spans([join_spans(one.spans) for one in conversations]),
        prompt=conversations[0].opening,
        response="".join(turn.response for turn in turns),
        reasoning="".join(turn.reasoning for turn in turns),
        finish_reason="stop" if is_complete else "length",
        episode=episode,
        threads=() if has_main_only else tuple(one.thread() for one in conversations),
        messages=() if isinstance(task.prompt, str) else task.prompt,
        alternatives=Alternatives.joined(part for one in conversations for part in one.alternatives),
        routes=_routes_of(conversations),
    )


def _routes_of(conversations: Sequence[Conversation]) -> Routes | None:
    recorded = next((one.routes for one in conversations if one.routes is not None), None)
    if recorded is None:
        return None
    known = [unknown_routes(0, recorded) if one.routes is None else one.routes for one in conversations]
    return np.concatenate([padded_routes(of, one.num_tokens) for of, one in zip(known, conversations, strict=True)])
