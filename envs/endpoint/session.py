"""One session: the requests of one program, answered one after the other by a policy.

    waiting --a request--> answering --the answer--> waiting --the program's end--> closed

Consumes: requests. Waits for: the next request or the program's end, while waiting; the policy, while answering.
Unblocked by: the server, the program; the policy. A caller that waits for an answer is unblocked by the answer, by a
refusal, or by the end of the session, which refuses open requests.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.envs.endpoint.message_history import MessageHistory, NewContent
from penstock.envs.endpoint.requests import MODEL, ApiError, ChatRequest, bad_request
from penstock.envs.environment import EndpointAccess
from penstock.envs.workers.episode_child import EpisodeReply

MAX_QUESTIONS = 1024
_LATE_S = 1.0
"""A wait that is later than this shows that the event loop stood still; less is ordinary load. Seconds."""
MIN_KEY_CHARACTERS = 16
"""Shorter keys can be guessed."""


class SampledToken(NamedTuple):
    """Text of one token, special ones included, and its behavior logprob."""

    text: str
    logprob: float


class Piece(NamedTuple):
    """One piece of a streamed answer."""

    text: str
    tokens: tuple[SampledToken, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered turn.

    Attributes:
        text: Delivered text: without special tokens, cut before a stop text; in a chat, without reasoning.
        sampled_text: Text of all sampled tokens that were kept.
        tokens: Sampled tokens, if the request wants logprobs.
        version: Newest policy version that sampled a token.
        reasoning: Text between the marks of `env.reasoning`; None if answers are not split.
    """

    text: str
    sampled_text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_tokens: int
    tokens: tuple[SampledToken, ...] = ()
    version: int = 0
    reasoning: str | None = None


AnswerTurn = Callable[[NewContent, "Exchange"], Awaitable[Answer]]
"""Answers one turn of a session, or a plain question. Raises ApiError if this request cannot be answered (the session
continues), PenstockError if no further request can be."""


class Exchange:
    """A request and its answer. Any number of readers may follow it from its beginning.

    Attributes:
        was_delivered: A client has received the whole answer, or the refusal.
    """

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.answer: Answer | None = None
        self.error: ApiError | None = None
        self.was_delivered = False
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.error is not None

    def say(self, piece: Piece) -> None:
        """Stream a piece of the answer."""
        self._pieces.append(piece)
        self._wake()

    def finish(self, answer: Answer) -> None:
        self.answer = answer
        self._wake()

    def refuse(self, error: ApiError) -> None:
        self.error = error
        self._wake()

    async def result(self) -> Answer:
        """Wait for the answer.

        Raises:
            ApiError: If the request was refused.
        """
        while not self.is_over:
            await self._news.wait()
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces, past and future. After the last one, `result` does not wait."""
        index = 0
        while True:
            while index < len(self._pieces):
                yield self._pieces[index]
                index += 1
            if self.is_over:
                return
            await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Session:
    """One program's access to the policy.

    Args:
        name: Name in messages.
        serial: Key in the server's table of sessions.
        base_url: Address of the server.
        timeout_s: Longest time between two answers, not counting the policy's time, seconds. Refused requests do not
            extend it, so a program that continues after its budget is ended.

    Attributes:
        access: Address and key for the program.
        counts: Requests, refused ones, and those with a parameter that had no effect.
    """

    def __init__(self, name: str, serial: int, base_url: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self.counts: Counter[str] = Counter()
        self._secret = secrets.token_urlsafe(32)
        self.access = EndpointAccess(base_url, f"pk-{serial}-{self._secret}", MODEL)
        self._history = MessageHistory()
        self._incoming: asyncio.Queue[Exchange] = asyncio.Queue(maxsize=1)
        self._last: Exchange | None = None
        self._is_closed = False

    def has_secret(self, secret: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self._secret.encode(), secret.encode())

    def submit(self, request: ChatRequest) -> Exchange:
        """Submit a request. If it repeats the last one, whose answer was not delivered, return that exchange.

        Raises:
            ApiError: If another request is being answered.
        """
        last = self._last
        if last is not None and not last.was_delivered and last.request == request:
            return last
        if last is not None and not last.is_over:
            raise bad_request(
                "Another request of this session is being answered. A session is one conversation: wait for it.",
                code="concurrent_request",
            )
        self.counts["requests"] += 1
        self.counts["ignored_parameters"] += bool(request.ignored)
        exchange = self._last = Exchange(request)
        if self._is_closed:
            exchange.refuse(_session_ended())
        else:
            self._incoming.put_nowait(exchange)
        return exchange

    def counts_as_floats(self) -> dict[str, float]:
        """For `Episode.counts`."""
        return {name: float(count) for name, count in self.counts.items()}

    def refused(self) -> None:
        """Count a request that was not submitted."""
        self.counts["requests"] += 1
        self.counts["refused"] += 1

    async def serve(self, program: Coroutine[Any, Any, EpisodeReply], answer: AnswerTurn) -> EpisodeReply:
        """Run a program to its end, and answer its requests.

        Args:
            program: Runs the program; cancelled if this method raises.
            answer: Answers the requests.

        Raises:
            TrajectoryError: kind `env`, if the program fails, or gets no answer and does not end for `timeout_s`.
                Errors of `answer` propagate.
        """
        loop, running = asyncio.get_running_loop(), asyncio.ensure_future(program)
        incoming: asyncio.Task[Exchange] | None = None
        deadline = loop.time() + self._timeout_s
        try:
            while True:
                incoming = incoming or asyncio.create_task(self._incoming.get())
                left_s = deadline - loop.time()
                if left_s < -_LATE_S:
                    # This loop stood still, and the requests of that time are still unread.
                    deadline = loop.time() + (left_s := self._timeout_s)
                await asyncio.wait({running, incoming}, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return running.result()
                if loop.time() - deadline > _LATE_S:
                    continue
                if left_s <= 0 or not incoming.done():
                    message = f"{self.name}: neither a request that could be answered nor an end"
                    raise TrajectoryError("env", f"{message} within {self._timeout_s:g} s (env.episode.timeout_s)")
                exchange, incoming = incoming.result(), None
                # A refused request does not count: a program that repeats it after its last turn would never end.
                if await self._answer(exchange, answer):
                    deadline = loop.time() + self._timeout_s
        finally:
            self.close()
            pending = [task for task in (running, incoming) if task is not None and not task.done()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def close(self) -> None:
        """Refuse open and future requests."""
        self._is_closed = True
        if self._last is not None and not self._last.is_over:
            self._last.refuse(_session_ended())

    async def _answer(self, exchange: Exchange, answer: AnswerTurn) -> bool:
        """Answer or refuse a request. Returns whether it was answered."""
        request = exchange.request
        try:
            answered = await answer(self._history.new_content(request), exchange)
        except ApiError as error:
            self.counts["refused"] += 1
            exchange.refuse(error)
            return False
        self._history.record(request, answered.text, answered.sampled_text, answered.reasoning)
        exchange.finish(answered)
        return True


class Questions:
    """Answers plain questions to the policy, of a judge for example. The server uses it like a `Session`, but the
    requests are independent: they form no conversation, and nothing is recorded or trained.

    Consumes: requests with the key of the run. Waits for: the policy. Unblocked by: its answer, or the end of the run.
    Up to `MAX_QUESTIONS` questions are answered concurrently.
    """

    def __init__(self, key: str, answer: AnswerTurn) -> None:
        """Answer requests with `key`.

        Raises:
            ValueError: If the key is too short.
        """
        if len(key) < MIN_KEY_CHARACTERS:
            raise ValueError(f"the key has {len(key)} characters, expected at least {MIN_KEY_CHARACTERS}")
        self._key = key.encode()
        self._answer_turn = answer
        self._answering: set[asyncio.Task[None]] = set()

    def has_key(self, key: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self._key, key.encode())

    def submit(self, request: ChatRequest) -> Exchange:
        """Begin to answer a question.

        Raises:
            ApiError: If too many questions are being answered.
        """
        if len(self._answering) >= MAX_QUESTIONS:
            message = f"{MAX_QUESTIONS} questions are being answered. Ask again when some are."
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")
        exchange = Exchange(request)
        task = asyncio.create_task(self._answer(exchange), name="answer a question")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        return exchange

    def refused(self) -> None:
        """Questions are not counted."""

    async def close(self) -> None:
        """Refuse open questions."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            exchange.finish(await self._answer_turn(MessageHistory().new_content(exchange.request), exchange))
        except ApiError as error:
            exchange.refuse(error)
        except PenstockError as error:
            exchange.refuse(ApiError(503, str(error), kind="server_error", code="engines_lost"))
        except asyncio.CancelledError:
            exchange.refuse(_session_ended())
            raise


def _session_ended() -> ApiError:
    """500: the session ended during the request."""
    message = "The session ended before the request was answered."
    return ApiError(500, message, kind="server_error", code="session_ended")
