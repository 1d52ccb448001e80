"""The tokens of an agent program's session: each request is the next turn of one conversation (conversation.py).

The program decides when it sends a request, how many tokens it wants and which stop texts end the turn, in addition to
those of the run (stop_texts.py). The run's configuration decides how tokens are sampled.

Consumes: new messages of a session. Waits for: the turn to be sampled. Unblocked by: the trajectory runner.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Episode, EpisodeEnd, Trajectory
from penstock.envs.endpoint.message_history import NewContent
from penstock.envs.endpoint.requests import ChatRequest, bad_request, too_many_turns
from penstock.envs.endpoint.session import Answer, Exchange, Piece, SampledToken
from penstock.envs.reasoning import ReasoningReader, num_begun
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import (
    Conversation,
    EpisodeBudget,
    PartialTurn,
    SampleTurn,
    build_trajectory,
)
from penstock.rollout.trajectory.stop_texts import StopTextReader


class Recording:
    """Answers one session and keeps its tokens.

    Attributes:
        overrun: The budget that a request exceeded; None if none did.
    """

    def __init__(self, codec: TokenCodec, budget: EpisodeBudget, sampling: SamplingParams, sample: SampleTurn) -> None:
        self.overrun: EpisodeEnd | None = None
        self._codec = codec
        self._budget = budget
        self._sampling = sampling
        self._sample = sample
        self._conversation: Conversation | None = None

    async def answer(self, content: NewContent, exchange: Exchange) -> Answer:
        """Sample the next turn.

        Raises:
            ApiError: If a budget is exhausted, or the text cannot be encoded.
            TrajectoryError, PenstockError: From the engines.
        """
        request, before = exchange.request, self._conversation
        if before is not None and len(before.turns) >= self._budget.max_turns:
            self.overrun = self.overrun or "max_turns"
            raise too_many_turns(self._budget.max_turns)
        token_ids = self._encode(content, request)
        num_prompt = len(token_ids) + (before.num_tokens if before else 0)
        if num_prompt >= self._budget.max_tokens:
            self.overrun = self.overrun or "max_tokens"
            raise bad_request(
                f"This model's maximum context length is {self._budget.max_tokens} tokens. However, your messages "
                f"resulted in {num_prompt} tokens, which leaves none for an answer. Please reduce their length.",
                request.param,
                "context_length_exceeded",
            )
        if before is None:
            conversation = self._conversation = Conversation(
                token_ids, self._codec.decode_prompt(token_ids), self._sampling
            )
        else:
            conversation = before
            conversation.add_observation(token_ids, self._codec.decode_prompt(token_ids))
        partial = conversation.next_turn(self._budget.max_tokens, request.max_tokens)
        preceding, marks = conversation.newest_text, self._codec.reasoning if request.messages is not None else None
        thinking = None if marks is None else ReasoningReader(marks, preceding)
        stops = (*request.stop, *self._sampling.stop)
        reader = TurnReader(self._codec, exchange, partial, thinking, stops) if request.is_stream or stops else None
        await self._sample(partial)
        turn_text = self._codec.split(partial.token_ids, preceding)
        conversation.add_turn(partial, turn_text)
        sampled = turn_text.reasoning + turn_text.answer
        text, thought = sampled if reader is None else reader.finish(sampled), None
        if marks is not None:
            delivered = ReasoningReader(marks, preceding)
            delivered.read(text)
            delivered.finish()
            text, thought = delivered.answer, delivered.thought
        return Answer(
            text=text,
            sampled_text=sampled,
            finish_reason="stop" if partial.finish_reason == "stop" else "length",
            num_prompt_tokens=num_prompt,
            num_tokens=partial.num_tokens,
            tokens=_with_text(self._codec, partial.token_ids, partial.logprobs) if request.wants_logprobs else (),
            version=partial.spans[-1].version,
            reasoning=thought,
        )

    def trajectory(
        self, task: Task, trajectory_id: TrajectoryId, reply: EpisodeReply, counts: dict[str, float]
    ) -> Trajectory:
        """Build the trajectory of the session for the trainer.

        Raises:
            TrajectoryError: kind `env`, if nothing was sampled.
        """
        conversation = self._conversation
        if conversation is None:
            raise TrajectoryError("env", f"{task.task_id}: the agent ended without a request that could be answered")
        reward = reply.get("reward", None if self.overrun is None else 0.0)
        turns = tuple(conversation.turns)
        parts = dict(reply.get("parts", {}))
        episode = Episode(turns, self.overrun or "done", reward, parts, counts, reply.get("answer"))
        return build_trajectory([conversation], task, trajectory_id, episode)

    def _encode(self, content: NewContent, request: ChatRequest) -> tuple[int, ...]:
        """Plain text is what the program has rendered, so special tokens that it spells are its control tokens."""
        try:
            if isinstance(content, str) and (content or self._conversation is not None):
                return self._codec.encode_rendered(content)
            if self._conversation is None:
                return self._codec.encode_prompt(content, request.tool_schemas)
            return self._codec.encode_observation(content, self._conversation.token_ids[-1])
        except TrajectoryError as error:
            raise bad_request(error.detail, request.param, "invalid_value") from error
        except ConfigError as error:
            raise bad_request(" ".join(error.violations), request.param, "invalid_value") from error


class TurnReader:
    """Reads a turn while it is sampled: streams its text, and ends it after a stop text."""

    def __init__(
        self,
        codec: TokenCodec,
        exchange: Exchange,
        partial: PartialTurn,
        thinking: ReasoningReader | None,
        stops: Sequence[str],
    ) -> None:
        self._codec = codec
        self._exchange = exchange
        self._partial = partial
        self._thinking = thinking
        self._reader = StopTextReader(codec, stops)
        self._num_said = 0
        self._num_tokens = 0
        self._is_cut = False
        partial.on_delta = self._read

    def finish(self, sampled: str) -> str:
        """Return the text to deliver; `sampled` is the text of all tokens."""
        if not self._is_cut and sampled.startswith(self._reader.text):
            return sampled  # including trailing bytes that never completed a character
        return self._reader.text

    def _read(self, delta: TokenDelta) -> None:
        if self._is_cut:
            return
        request, num_read = self._exchange.request, 0
        for token_id in delta.token_ids:
            num_read += 1
            if self._reader.completes(token_id):
                self._is_cut = True
                self._partial.cut(self._num_tokens + num_read)
                break
        self._num_tokens += num_read
        if request.is_stream:
            self._say(delta, num_read, request)

    def _say(self, delta: TokenDelta, num_read: int, request: ChatRequest) -> None:
        """Stream the new text, except an end that may become a stop text."""
        so_far = self._reader.text
        end = len(so_far) - (0 if self._is_cut else num_begun(so_far, self._reader.stops))
        text, self._num_said = so_far[self._num_said : end], max(self._num_said, end)
        ids, logprobs = delta.token_ids[:num_read], delta.logprobs[:num_read]
        tokens = _with_text(self._codec, ids, logprobs) if request.wants_logprobs else ()
        thought = ""
        if self._thinking is not None:
            thought, text = self._thinking.read(text)
        if text or tokens or thought:
            self._exchange.say(Piece(text, tokens, thought))


def _with_text(codec: TokenCodec, token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[SampledToken, ...]:
    texts = [str(codec.tokenizer.decode([token_id])) for token_id in token_ids]
    return tuple(SampledToken(text, logprob) for text, logprob in zip(texts, logprobs, strict=True))


class PolicyAnswers:
    """The policy's answers to plain questions (envs/endpoint/session.py, `Questions`), concurrent with its rollouts.

    Answers are sampled greedily and belong to no group, so they never enter the ledger.

    Args:
        codec: Tokenizer and chat template of the policy.
        sample: Samples a turn that has a name and belongs to no trajectory.
        max_tokens: Limit of question and answer together.
        sampling: Sampling parameters of the run, of which only the length and the stop tokens are used.
    """

    def __init__(
        self,
        codec: TokenCodec,
        sample: Callable[[str, PartialTurn], Awaitable[None]],
        max_tokens: int,
        sampling: SamplingParams,
    ) -> None:
        self._codec = codec
        self._sample = sample
        self._budget = EpisodeBudget(max_turns=1, max_tokens=max_tokens)
        self._sampling = replace(sampling, temperature=0.0, seed=None)
        self._numbers = itertools.count()

    async def answer(self, content: NewContent, exchange: Exchange) -> Answer:
        """Answer one question.

        Raises:
            ApiError: If it leaves no space for an answer, or its text cannot be encoded.
            TrajectoryError, PenstockError: From the engines.
        """
        name = f"question/{next(self._numbers)}"
        recording = Recording(self._codec, self._budget, self._sampling, partial(self._sample, name))
        return await recording.answer(content, exchange)
