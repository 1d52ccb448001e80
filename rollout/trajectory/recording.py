"""The tokens of an agent program's session: each request is the next turn of one of its threads (conversation.py).

The program decides when it sends a request, what it repeats of its history (envs/endpoint/message_history.py), how many
tokens it wants and which stop texts end the turn, in addition to those of the run (stop_texts.py). The run's
configuration decides how tokens are sampled, and which threads are trained (`env.endpoint.threads`).

Consumes: requests of a session, several concurrently if the program sends them so. Waits for: the turn to be sampled.
Unblocked by: the trajectory runner.

Budgets are counted for threads of equal form (tools, chat or text), so titles and other side requests do not use up the
turns of the agent. They are checked before the history.

A turn that the engines fail to sample leaves no trace in its thread: the program is told, and may ask again, go on with
its other threads, or fail.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import MAIN_THREAD, Episode, EpisodeEnd, Trajectory
from penstock.envs.config import TrainedThreads
from penstock.envs.endpoint.answer_parser import AnswerParser, ContentReader, HermesParser, SampledTurn
from penstock.envs.endpoint.answers import answer_message
from penstock.envs.endpoint.message_history import Form, Histories, Place, calls_of, form_of
from penstock.envs.endpoint.requests import (
    ApiError,
    BudgetError,
    Call,
    ChatMessage,
    ChatRequest,
    bad_request,
    too_many_turns,
)
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

MAX_FORMS = 32
"""Different sets of tools of one session, each with a budget of its own."""


class Recording:
    """Answers one session and keeps its tokens.

    Args:
        codec: Tokenizer and chat template of the policy.
        budget: Limits of the episode.
        sampling: Sampling parameters of the run.
        sample: Samples a turn.
        threads: `env.endpoint.threads`.
        parser: Reads tool calls, and reasoning if it is not split by marks.

    Attributes:
        failure: Why the engines did not sample the newest turn; None: they did.
    """

    def __init__(
        self,
        codec: TokenCodec,
        budget: EpisodeBudget,
        sampling: SamplingParams,
        sample: SampleTurn,
        threads: TrainedThreads = "agent",
        parser: AnswerParser | None = None,
    ) -> None:
        self._codec = codec
        self._parser = parser or HermesParser()
        self._budget = budget
        self._sampling = sampling
        self._sample = sample
        self._threads = threads
        self._histories = Histories(is_strict=threads == "strict")
        self._conversations: dict[str, Conversation] = {}
        self._forms: dict[Conversation, Form] = {}
        self._num_turns: Counter[Form] = Counter()
        self._order: list[tuple[Conversation, int]] = []
        self._exhausted: dict[Form, EpisodeEnd] = {}
        self._is_cut: dict[Form, bool] = {}
        self.failure: TrajectoryError | None = None
        self._num_failed = 0

    @property
    def cut_off(self) -> EpisodeEnd | None:
        """The limit of ours that the agent has met: it refused its last request, or cut its last answer."""
        form = self._agent_form()
        if form is None:
            return None
        return self._exhausted.get(form, "max_tokens" if self._is_cut[form] else None)

    async def answer(self, exchange: Exchange) -> Answer:
        """Sample the next turn of a thread.

        Raises:
            ApiError: If a budget is exhausted, the text cannot be encoded, or the engines fail to sample the turn.
            EngineLostError: If no engine is left.
        """
        request = exchange.request
        form = form_of(request)
        self._check_turns(form)
        place = self._histories.place(request)
        conversation = self._conversations.get(place.thread)
        above = None if place.fork_of is None else self._conversations[place.fork_of]
        if above is not None:
            before = above.tokens_after(place.num_turns)
        else:
            before = () if conversation is None else conversation.token_ids
        token_ids = self._encode(place, request, before)
        num_prompt = len(before) + len(token_ids)
        if num_prompt >= self._budget.max_tokens:
            self._exhausted.setdefault(form, "max_tokens")
            raise BudgetError(
                f"This model's maximum context length is {self._budget.max_tokens} tokens. However, your messages "
                f"resulted in {num_prompt} tokens, which leaves none for an answer. Please reduce their length.",
                "context_length_exceeded",
                request.param,
            )
        with self._histories.answering(place, request):
            self._num_turns[form] += 1
            self._exhausted.pop(form, None)
            text = self._codec.decode_prompt(token_ids)
            if conversation is None:
                conversation = self._conversations[place.thread] = Conversation(
                    token_ids, text, self._sampling, place.thread, fork_of=above, num_turns=place.num_turns
                )
                self._forms[conversation] = form
            else:
                conversation.add_observation(token_ids, text)
            try:
                answer = await self._next_turn(conversation, exchange, num_prompt)
            except TrajectoryError as error:
                raise self._failed(place, form, error) from error
            self.failure = None
            self._histories.record(place, request, answer_message(answer), answer.sampled_text)
        return answer

    def _failed(self, place: Place, form: Form, error: TrajectoryError) -> ApiError:
        """Forget a turn that was not sampled to its end; returns the answer to the program.

        A program that fails now fails by this, and not by a limit that has cut an earlier answer.
        """
        self.failure, self._num_failed = error, self._num_failed + 1
        self._num_turns[form] -= 1
        self._is_cut[form] = False
        conversation = self._conversations[place.thread]
        conversation.end()
        if not conversation.turns:
            del self._conversations[place.thread], self._forms[conversation]
        return ApiError(503, f"The turn was not sampled: {error.summary}", kind="server_error", code="turn_failed")

    async def _next_turn(self, conversation: Conversation, exchange: Exchange, num_prompt: int) -> Answer:
        request = exchange.request
        partial = conversation.next_turn(self._budget.max_tokens, request.max_tokens)
        preceding, marks = conversation.newest_text, self._codec.reasoning if request.messages is not None else None
        thinking = None if marks is None else ReasoningReader(marks, preceding)
        stops, parser = (*request.stop, *self._sampling.stop), self._parser
        is_parsed = request.messages is not None and (bool(request.tools) or parser.reads_reasoning)
        content = ContentReader(parser.signs if is_parsed else ())
        keeps_special = is_parsed and parser.keeps_special_tokens
        reader = None
        if request.is_stream or stops:
            texts = StopTextReader(self._codec, stops, keeps_special_tokens=keeps_special)
            reader = TurnReader(self._codec, exchange, partial, texts, thinking, content)
        await self._sample(partial)
        turn_text = self._codec.split(partial.token_ids, preceding)
        conversation.add_turn(partial, turn_text)
        self._order.append((conversation, len(conversation.turns) - 1))
        is_complete = partial.finish_reason == "stop"
        form, is_own_limit = form_of(request), partial.num_tokens == request.max_tokens
        self._is_cut[form] = not is_complete and not is_own_limit
        sampled = turn_text.reasoning + turn_text.answer
        text = self._codec.decode_turn(partial.token_ids) if keeps_special else sampled
        text, thought = text if reader is None else reader.finish(text), None
        if marks is not None:
            delivered = ReasoningReader(marks, preceding)
            delivered.read(text)
            delivered.finish()
            text, thought = delivered.answer, delivered.thought
        calls: tuple[Call, ...] = ()
        if is_parsed:
            text, calls, reasoning = await parser.parse(SampledTurn(text, request.tool_schemas, partial.token_ids))
            thought = thought if reasoning is None else reasoning
        return Answer(
            text=text,
            sampled_text=sampled,
            finish_reason="stop" if is_complete else "length",
            num_prompt_tokens=num_prompt,
            num_tokens=partial.num_tokens,
            tokens=_with_text(self._codec, partial.token_ids, partial.logprobs) if request.wants_logprobs else (),
            version=partial.spans[-1].version,
            reasoning=thought,
            calls=calls,
        )

    def trajectory(
        self,
        task: Task,
        trajectory_id: TrajectoryId,
        reply: EpisodeReply,
        counts: dict[str, float],
        *,
        is_cut: bool = False,
    ) -> Trajectory:
        """Build the trajectory of the session for the trainer.

        Args:
            task: The task.
            trajectory_id: Its id.
            reply: Of the program.
            counts: Of the session and the environment.
            is_cut: A limit of ours has stopped the program, which failed by that.

        Raises:
            TrajectoryError: kind `env`, or that of the engines' failure, if nothing was sampled.
        """
        form, cut_off = self._agent_form(), self.cut_off
        if form is None:
            nothing = f"{task.task_id}: the agent ended without a request that could be answered"
            raise self.failure or TrajectoryError("env", nothing)
        for one in self._conversations.values():
            one.end()
        of_agent = [one for one, _ in self._order if self._threads == "all" or self._forms[one] == form]
        if self._threads == "last":
            trained, with_loss = [of_agent[-1].linear()], set(of_agent[-1].path())
        else:
            trained = list(dict.fromkeys(of_agent))
            with_loss = {(one, index) for one, index in self._order if one in trained}
        self._call_main(trained[0])
        said = [((one, index) in with_loss, replace(one.turns[index], thread=one.name)) for one, index in self._order]
        turns, side = ([turn for is_trained, turn in said if is_trained is wanted] for wanted in (True, False))
        if self._threads == "last":
            turns = [replace(turn, thread=MAIN_THREAD) for turn in trained[0].turns]
        if side:
            counts = counts | {"untrained_tokens": float(sum(turn.num_tokens for turn in side))}
        if self._num_failed:
            counts = counts | {"failed_turns": float(self._num_failed)}
        end = (cut_off or "max_turns") if is_cut else self._exhausted.get(form)
        reward = reply.get("reward", None if end is None and cut_off is None else 0.0)
        parts, answer = dict(reply.get("parts", {})), reply.get("answer")
        episode = Episode(tuple(turns), end or "done", reward, parts, counts, answer, tuple(side))
        return build_trajectory(trained, task, trajectory_id, episode)

    def _call_main(self, first: Conversation) -> None:
        """Give the first trained thread the name of the only thread of an ordinary trajectory; a title has had it."""
        for one in self._conversations.values():
            if one.name == MAIN_THREAD:
                one.name = first.name
        first.name = MAIN_THREAD

    def _agent_form(self) -> Form | None:
        """Form of the thread with the most turns, before equals one with tools; None if nothing was sampled."""
        deepest = max(
            (one for one in self._conversations.values() if one.turns),
            key=lambda one: (one.depth, bool(self._forms[one][1])),
            default=None,
        )
        return None if deepest is None else self._forms[deepest]

    def _check_turns(self, form: Form) -> None:
        if form not in self._num_turns and len(self._num_turns) >= MAX_FORMS:
            raise bad_request(f"A session may have {MAX_FORMS} different sets of tools.", "tools", "too_many_tools")
        if self._num_turns[form] >= self._budget.max_turns:
            self._exhausted.setdefault(form, "max_turns")
            raise too_many_turns(self._budget.max_turns)

    def _encode(self, place: Place, request: ChatRequest, before: tuple[int, ...]) -> tuple[int, ...]:
        """Plain text is what the program has rendered, so special tokens that it spells are its control tokens."""
        try:
            if isinstance(place.content, str) and (place.content or before):
                return self._codec.encode_rendered(place.content)
            content = place.content if isinstance(place.content, str) else self._messages(place.content)
            if not before:
                return self._codec.encode_prompt(content, request.tool_schemas)
            answered = (request.messages or ())[-len(content) - 1 : -len(content)]
            calls = [call.name for one in answered for call in calls_of(one)]
            return self._codec.encode_observation(content, before[-1], calls)
        except TrajectoryError as error:
            raise bad_request(error.detail, request.param, "invalid_value") from error
        except ConfigError as error:
            raise bad_request(" ".join(error.violations), request.param, "invalid_value") from error

    def _messages(self, added: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Messages for the chat template, which writes calls and reasoning of earlier answers in its own form."""
        template, messages = self._codec.turn_template, []
        for one in added:
            thought = {"reasoning_content": one.reasoning} if one.reasoning else {}
            plain = {"role": one.role, "content": one.content}
            messages.append((template.message_with_calls(one.content, one.calls) if one.calls else plain) | thought)
        return messages


class TurnReader:
    """Reads a turn while it is sampled: streams its text, and ends it after a stop text."""

    def __init__(
        self,
        codec: TokenCodec,
        exchange: Exchange,
        partial: PartialTurn,
        texts: StopTextReader,
        thinking: ReasoningReader | None,
        content: ContentReader,
    ) -> None:
        self._codec = codec
        self._exchange = exchange
        self._partial = partial
        self._thinking = thinking
        self._content = content
        self._reader = texts
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
        text = self._content.read(text)
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

    async def answer(self, exchange: Exchange) -> Answer:
        """Answer one question.

        Raises:
            ApiError: If it leaves no space for an answer, or its text cannot be encoded.
            TrajectoryError, PenstockError: From the engines.
        """
        name = f"question/{next(self._numbers)}"
        recording = Recording(self._codec, self._budget, self._sampling, partial(self._sample, name))
        return await recording.answer(exchange)
