"""Plain questions to the policy, of a judge for example: no session, no dialogue, nothing is recorded or trained.

Consumes: requests with the key of the run. Waits for: the policy. Unblocked by: its answer, or the end of the run. Any
number of questions up to `MAX_QUESTIONS` are answered at the same time, each on its own.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Protocol

from penstock.dataflow.errors import PenstockError
from penstock.envs.endpoint.conversation import Conversation, Part
from penstock.envs.endpoint.errors import ApiError, run_failed, too_many_questions
from penstock.envs.endpoint.requests import Asked
from penstock.envs.endpoint.session import Answer, Exchange

MAX_QUESTIONS = 1024
FEWEST_CHARACTERS = 16
"""Of a key: shorter ones can be guessed."""


class Answering(Protocol):
    """What answers a question."""

    async def answer(self, part: Part, exchange: Exchange) -> Answer:
        """Answer it.

        Raises:
            ApiError: If it cannot be.
            PenstockError: If nobody can answer any more.
        """
        ...


class Questions:
    """As a `Session` for the server, but each request stands for itself."""

    def __init__(self, key: str, policy: Answering) -> None:
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

    def ask(self, asked: Asked) -> Exchange:
        """Begin to answer.

        Raises:
            ApiError: If too many are being answered.
        """
        if len(self._answering) >= MAX_QUESTIONS:
            raise too_many_questions(MAX_QUESTIONS)
        exchange = Exchange(asked)
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
            exchange.finish(await self._policy.answer(Conversation().next_part(exchange.asked), exchange))
        except ApiError as error:
            exchange.refuse(error)
        except PenstockError as error:
            exchange.refuse(ApiError(503, str(error), kind="server_error", code="engines_lost"))
        except asyncio.CancelledError:
            exchange.refuse(run_failed())
            raise
