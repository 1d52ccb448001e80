"""One session: the requests of one program, answered by a policy while the program runs.

    waiting --a request--> answering --the last open answer--> waiting --the program's end--> closed

Consumes: requests, any number of them concurrently. Waits for: the next request or the program's end, while waiting;
the policy, while answering. Unblocked by: the server, the program; the policy. A caller that waits for an answer is
unblocked by the answer, by a refusal, or by the end of the session, which refuses open requests.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.envs.endpoint.message_history import Form, form_of
from penstock.envs.endpoint.requests import MODEL, ApiError, BudgetError, Call, ChatRequest
from penstock.envs.environment import EndpointAccess
from penstock.envs.workers.episode_child import EpisodeReply

MAX_QUESTIONS = 1024
MAX_CONCURRENT = 64
"""Requests of one session that may be answered at once."""
GRACE_S = 5.0
"""A program that asks on for longer, after a budget has refused its request, is ended. Seconds."""
MAX_REPEATS = 3
"""A program whose request is refused so often in a row, always the same, is ended."""
_LATE_S = 1.0
"""A wait that is later than this shows that the event loop stood still; less is ordinary load. Seconds."""
MIN_KEY_CHARACTERS = 16
"""Shorter keys can be guessed."""


class SampledToken(NamedTuple):
    """Text of one token, special ones included, and its behavior logprob."""

    text: str
    logprob: float


class Piece(NamedTuple):
    """One piece of a streamed answer; its text is content whatever follows (answer_parser.py)."""

    text: str
    tokens: tuple[SampledToken, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered turn."""

    text: str
    """Delivered text: without special tokens, cut before a stop text; in a chat, without reasoning and calls."""
    sampled_text: str
    """Text of all sampled tokens that were kept."""
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_tokens: int
    tokens: tuple[SampledToken, ...] = ()
    """Sampled tokens, if the request wants logprobs."""
    version: int = 0
    """Newest policy version that sampled a token."""
    reasoning: str | None = None
    """Reasoning, without its marks; None if answers are not split."""
    calls: tuple[Call, ...] = ()
    """Calls of tools."""


AnswerTurn = Callable[["Exchange"], Awaitable[Answer]]
"""Answers one turn of a session, or a plain question. Raises ApiError if this request cannot be answered (the session
continues), PenstockError if no further request can be."""


class Exchange:
    """A request and its answer. Any number of readers may follow it from its beginning.

    Attributes:
        was_delivered: A client has received the whole answer, or the refusal.
        num_readers: Clients that wait for it.
    """

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.answer: Answer | None = None
        self.error: ApiError | None = None
        self.was_delivered = False
        self.num_readers = 0
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.error is not None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a client while it waits."""
        self.num_readers += 1
        try:
            yield
        finally:
            self.num_readers -= 1

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
        is_over_budget: The program was ended because it asked on after a budget.
    """

    def __init__(self, name: str, serial: int, base_url: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self.counts: Counter[str] = Counter()
        self._secret = secrets.token_urlsafe(32)
        self.access = EndpointAccess(base_url, f"pk-{serial}-{self._secret}", MODEL)
        self._incoming: asyncio.Queue[Exchange] = asyncio.Queue()
        self._undelivered: list[Exchange] = []
        self._refusals = _Refusals()
        self._is_closed = False
        self.is_over_budget = False
        self._had_enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has_secret(self, secret: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self._secret.encode(), secret.encode())

    def submit(self, request: ChatRequest) -> Exchange:
        """Submit a request. If it repeats one whose client has gone away without the answer, return that exchange.

        Raises:
            ApiError: If too many requests are being answered.
        """
        kept = [one for one in self._undelivered if not one.was_delivered]
        gone = [one for one in kept if one.is_over and not one.num_readers]  # their clients may repeat them
        self._undelivered = [one for one in kept if one not in gone[:-MAX_CONCURRENT]]
        for one in self._undelivered:
            if not one.num_readers and one.request == request:
                return one
        if sum(not one.is_over for one in self._undelivered) >= MAX_CONCURRENT:
            message = f"{MAX_CONCURRENT} requests of this session are being answered. Wait for one of them."
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")
        self.counts["requests"] += 1
        self.counts["ignored_parameters"] += bool(request.ignored)
        exchange = Exchange(request)
        self._undelivered.append(exchange)
        if self._is_closed:
            exchange.refuse(_session_ended())
        else:
            self._incoming.put_nowait(exchange)
        return exchange

    def counts_as_floats(self) -> dict[str, float]:
        """For `Episode.counts`."""
        return {name: float(count) for name, count in self.counts.items()}

    def refused(self, request: object, error: Exception) -> None:
        """Count a refused request, also one that was not submitted; equal ones are equal `request`s."""
        self.counts["requests"] += not isinstance(request, ChatRequest)
        self.counts["refused"] += 1
        if any(not one.is_over for one in self._undelivered):
            return  # the program waits for an answer, so it does not insist on this one
        why = self._refusals.add(request, error, asyncio.get_running_loop().time())
        if why and not self._had_enough.done():
            self.is_over_budget = isinstance(error, BudgetError)
            self._had_enough.set_exception(TrajectoryError("env", f"{self.name}: {why}"))

    async def serve(self, program: Coroutine[Any, Any, EpisodeReply], answer: AnswerTurn) -> EpisodeReply:
        """Run a program to its end, and answer its requests.

        Args:
            program: Runs the program; cancelled if this method raises.
            answer: Answers the requests; called concurrently if they come concurrently.

        Raises:
            TrajectoryError: kind `env`, if the program fails, gets no answer and does not end for `timeout_s`, or asks
                on for too long after a refusal. Errors of `answer` propagate.
        """
        loop, running = asyncio.get_running_loop(), asyncio.ensure_future(program)
        incoming = asyncio.create_task(self._incoming.get())
        answering: set[asyncio.Task[bool]] = set()
        deadline = loop.time() + self._timeout_s
        try:
            while True:
                left_s = deadline - loop.time()
                if left_s < -_LATE_S:
                    # This loop stood still, and the requests of that time are still unread.
                    deadline = loop.time() + (left_s := self._timeout_s)
                limit_s = None if answering else max(left_s, 0)
                waits: set[asyncio.Future[Any]] = {running, incoming, self._had_enough, *answering}
                await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return running.result()
                if self._had_enough.done():
                    self._had_enough.result()
                ended = {task for task in answering if task.done()}
                # A refused request does not count: a program that repeats it after its last turn would never end.
                were_answered = [task.result() for task in ended]
                answering -= ended
                if any(were_answered) or answering:
                    deadline = loop.time() + self._timeout_s
                if incoming.done():
                    answering.add(asyncio.create_task(self._answer(incoming.result(), answer), name="answer a turn"))
                    incoming = asyncio.create_task(self._incoming.get())
                elif not ended and 0 <= loop.time() - deadline <= _LATE_S:
                    message = f"{self.name}: neither a request that could be answered nor an end"
                    raise TrajectoryError("env", f"{message} within {self._timeout_s:g} s (env.episode.timeout_s)")
        finally:
            self.close()
            started: list[asyncio.Future[Any]] = [running, incoming, self._had_enough, *answering]
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    def close(self) -> None:
        """Refuse open and future requests."""
        self._is_closed = True
        for one in self._undelivered:
            if not one.is_over:
                one.refuse(_session_ended())

    async def _answer(self, exchange: Exchange, answer: AnswerTurn) -> bool:
        """Answer or refuse a request. Returns whether it was answered."""
        try:
            answered = await answer(exchange)
        except ApiError as error:
            exchange.refuse(error)
            self.refused(exchange.request, error)
            return False
        self._refusals = _Refusals()
        exchange.finish(answered)
        return True


class _Refusals:
    """The refusals since the last answer."""

    def __init__(self) -> None:
        self._last: object = None
        self._num_repeats = 0
        self._over_budget: dict[Form | None, list[float]] = {}

    def add(self, request: object, error: Exception, now: float) -> str:
        """Add one; `now` in seconds. Returns why the program is to be ended; empty if it is not."""
        self._num_repeats = self._num_repeats + 1 if request == self._last else 1
        self._last = request
        if self._num_repeats >= MAX_REPEATS:
            return f"it has sent a request {MAX_REPEATS} times that is refused: {error}"
        if isinstance(error, BudgetError):
            # A budget is that of one set of tools; several threads of it may ask once each.
            since = self._over_budget.setdefault(form_of(request) if isinstance(request, ChatRequest) else None, [])
            since.append(now)
            if len(since) >= MAX_REPEATS and now - since[0] > GRACE_S:
                return f"it asks on, {now - since[0]:.0f} s after its budget was exhausted: {error}"
        return ""


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

    def refused(self, request: object, error: Exception) -> None:
        """Questions are not counted."""

    async def close(self) -> None:
        """Refuse open questions."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            exchange.finish(await self._answer_turn(exchange))
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
