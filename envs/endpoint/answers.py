"""How an answer is written: the seam between a session, which has text, and a protocol, which has bodies and events.

    pieces of an answer -> AnswerReader -> reasoning, text, calls -> AnswerWriter of a protocol -> bodies, events

Invariant: what the events of a stream add up to is what the body that is not streamed says. `AnswerReader` gives both
the same text and calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from penstock.envs.endpoint.message_history import split_answer
from penstock.envs.endpoint.requests import ApiError, Call, ChatMessage, ChatRequest, Json
from penstock.envs.endpoint.session import Answer, Piece
from penstock.envs.reasoning import num_begun
from penstock.envs.tools.functions import CALL_OPENING


class AnswerWriter(Protocol):
    """Writes the answer to one request in the form of its protocol: either `whole`, or the events of a stream."""

    request: ChatRequest

    def whole(self, answer: Answer) -> Json:
        """The body of an answer that is not streamed."""
        ...

    def begin(self) -> Iterator[bytes]:
        """The events before the first piece."""
        ...

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """The events for a piece."""
        ...

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The events after the last piece."""
        ...

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """The events after the last piece of a stream that has no answer."""
        ...


class Rest(NamedTuple):
    """What the pieces have not said of an answer; all of it, if none was read.

    Attributes:
        finish_reason: Why the turn ended, in the words of Chat Completions.
    """

    reasoning: str
    text: str
    calls: Sequence[Call]
    finish_reason: Literal["stop", "length", "tool_calls"]


class AnswerReader:
    """Reads an answer in pieces. Tool calls are held back until they are complete, with the space before them.

    Args:
        request: The request that is answered.
    """

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._reasoning = self._text = self._held = ""

    def read(self, piece: Piece) -> tuple[str, str]:
        """The reasoning and the text that a piece adds."""
        text = self._held + piece.text
        ready = text[: _end_of_text(text)].rstrip() if self._request.tools else text
        self._held = text[len(ready) :]
        self._reasoning += piece.reasoning
        self._text += ready
        return piece.reasoning, ready

    def finish(self, answer: Answer) -> Rest:
        """The rest of the answer."""
        content, calls = split_answer(self._request, answer.text)
        text = answer.text
        if calls:
            text = text[: text.find(content) + len(content)] if content else ""
        return Rest(
            reasoning=(answer.reasoning or "").removeprefix(self._reasoning),
            text=text.removeprefix(self._text),
            calls=calls,
            finish_reason="tool_calls" if calls else answer.finish_reason,
        )


def answer_message(request: ChatRequest, answer: Answer) -> ChatMessage:
    """The answer as a message of the history that continues it."""
    content, calls = split_answer(request, answer.text)
    return ChatMessage("assistant", content.strip(), tuple(calls), (answer.reasoning or "").strip())


def data_event(data: Json, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def _end_of_text(text: str) -> int:
    """Position where a tool call begins, or where an incomplete opening tag begins."""
    begins = text.find(CALL_OPENING)
    return begins if begins >= 0 else len(text) - num_begun(text, [CALL_OPENING])
