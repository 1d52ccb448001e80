"""One session: the requests of one program, answered one after the other by a policy.

    thinking --a request--> answering --its end--> thinking --the program's end--> closed

Consumes: requests. Waits for: the next request or the program's end, while thinking; the policy, while answering.
Unblocked by: the server, the program; the policy. Who waits for an answer is unblocked by it, by a refusal, or by the
session's end, which refuses what is open.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.envs.endpoint.message_history import MessageHistory, NewContent
from penstock.envs.endpoint.requests import MODEL, ApiError, ChatRequest, bad_request
from penstock.envs.environment import EndpointAccess
from penstock.envs.workers.episode_child import EpisodeReply

MAX_QUESTIONS = 1024
_LATE_S = 1.0
"""By how much a wait is late in a loop that stood still, seconds; less is ordinary load."""
FEWEST_CHARACTERS = 16
"""Of a key: shorter ones can be guessed."""


class SampledToken(NamedTuple):
    """Text of one token, special ones included, and its behavior logprob."""

    text: str
    logprob: float


class Piece(NamedTuple):
    """What a stream says at a time."""

    text: str
    tokens: tuple[SampledToken, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered turn.

    Attributes:
        text: As it is delivered: without special tokens, cut before a stop text; of chat, without reasoning.
        sampled_text: Of all sampled tokens that were kept.
        tokens: They, if logprobs were requested.
        version: Newest policy version that sampled one.
        reasoning: Text between the marks of `env.reasoning`; None where answers are not split.
    """

    text: str
    sampled_text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_tokens: int
    tokens: tuple[SampledToken, ...] = ()
    version: int = 0
    reasoning: str | None = None


class Policy(Protocol):
    """What answers a session, or questions."""

    async def answer(self, content: NewContent, exchange: Exchange) -> Answer:
        """Answer one turn.

        Raises:
            ApiError: If it cannot be; the session goes on without it.
            PenstockError: If nobody can answer any more.
        """
        ...


class Exchange:
    """A request and what becomes of it; any number of readers may follow it, from its beginning.

    Attributes:
        was_delivered: Somebody got the whole answer, or the refusal.
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
        """Wait for the end.

        Raises:
            ApiError: If it was refused.
        """
        while not self.is_over:
            await self._news.wait()
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces there are and will be; then `result` is at once there."""
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
        name: For messages.
        serial: Its place in the table of the server.
        base_url: Of the server.
        timeout_s: Longest time between two answers, without that of the policy; seconds. Refused requests do not
            extend it, so a program that goes on after its budget ends.

    Attributes:
        access: What the program has to know.
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
        """Hand in a request, or find the one that it repeats because its answer did not arrive.

        Raises:
            ApiError: If another one is being answered.
        """
        last = self._last
        if last is not None and not last.was_delivered and last.request == request:
            return last
        if last is not None and not last.is_over:
            raise bad_request(
                "Another request of this session is being answered. A session is one dialogue: wait for it.",
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
        """Count a request that was not handed in."""
        self.counts["requests"] += 1
        self.counts["refused"] += 1

    async def serve(self, program: Coroutine[Any, Any, EpisodeReply], policy: Policy) -> EpisodeReply:
        """Run a program to its end, and answer it meanwhile.

        Args:
            program: Runs it; cancelled if it is not over.
            policy: What answers.

        Raises:
            TrajectoryError: kind `env`, if the program fails, or gets no answer and does not end for `timeout_s`; and
                what the policy raises.
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
                if await self._answer(exchange, policy):
                    deadline = loop.time() + self._timeout_s
        finally:
            self.close()
            pending = [task for task in (running, incoming) if task is not None and not task.done()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def close(self) -> None:
        """Refuse what is open and what comes."""
        self._is_closed = True
        if self._last is not None and not self._last.is_over:
            self._last.refuse(_session_ended())

    async def _answer(self, exchange: Exchange, policy: Policy) -> bool:
        """Answer or refuse a request. Returns whether it was answered."""
        request = exchange.request
        try:
            answer = await policy.answer(self._history.new_content(request), exchange)
        except ApiError as error:
            self.counts["refused"] += 1
            exchange.refuse(error)
            return False
        self._history.record(request, answer.text, answer.sampled_text, answer.reasoning)
        exchange.finish(answer)
        return True


class Questions:
    """As a `Session` for the server, but each request stands for itself: plain questions to the policy, of a judge for
    example. No dialogue, nothing is recorded or trained.

    Consumes: requests with the key of the run. Waits for: the policy. Unblocked by: its answer, or the end of the run.
    Any number of questions up to `MAX_QUESTIONS` are answered at the same time, each on its own.
    """

    def __init__(self, key: str, policy: Policy) -> None:
        """Answer whoever has `key`.

        Raises:
            ValueError: If it is too short.
        """
        if len(key) < FEWEST_CHARACTERS:
            raise ValueError(f"the key has {len(key)} characters, expected at least {FEWEST_CHARACTERS}")
        self._key = key.encode()
        self._policy = policy
        self._answering: set[asyncio.Task[None]] = set()

    def has_key(self, key: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self._key, key.encode())

    def submit(self, request: ChatRequest) -> Exchange:
        """Begin to answer.

        Raises:
            ApiError: If too many are being answered.
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
        """Nobody counts."""

    async def close(self) -> None:
        """Refuse what is open."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            exchange.finish(await self._policy.answer(MessageHistory().new_content(exchange.request), exchange))
        except ApiError as error:
            exchange.refuse(error)
        except PenstockError as error:
            exchange.refuse(ApiError(503, str(error), kind="server_error", code="engines_lost"))
        except asyncio.CancelledError:
            exchange.refuse(_session_ended())
            raise


def _session_ended() -> ApiError:
    """500: it ended under the request."""
    message = "The session ended before the request was answered."
    return ApiError(500, message, kind="server_error", code="session_ended")
