"""How an answer is written: the seam between a session, which has text, and a protocol, which has bodies and events.

    pieces of an answer, then the answer -> AnswerWriter of a protocol -> bodies, events

Invariant: what the events of a stream add up to is what the body that is not streamed says. A piece is content whatever
follows it (answer_parser.py), and `AnswerReader` gives the rest of the answer at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from penstock.envs.endpoint.requests import ApiError, Call, ChatMessage, ChatRequest, Json
from penstock.envs.endpoint.session import Answer, Piece, SampledToken


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
    """What the pieces have not said of an answer; all of it, if none was read."""

    reasoning: str
    text: str
    calls: Sequence[Call]
    finish_reason: Literal["stop", "length", "tool_calls"]
    """Why the turn ended, in the words of Chat Completions."""


class AnswerReader:
    """Keeps what the pieces of a stream have said of an answer."""

    def __init__(self) -> None:
        self._reasoning = self._text = ""

    def read(self, piece: Piece) -> tuple[str, str]:
        """The reasoning and the text of a piece, which is written now."""
        self._reasoning += piece.reasoning
        self._text += piece.text
        return piece.reasoning, piece.text

    def finish(self, answer: Answer) -> Rest:
        """The rest of the answer."""
        return Rest(
            reasoning=(answer.reasoning or "").removeprefix(self._reasoning),
            text=answer.text.removeprefix(self._text),
            calls=answer.calls,
            finish_reason="tool_calls" if answer.calls else answer.finish_reason,
        )


def token_logprobs(tokens: Sequence[SampledToken]) -> list[Json]:
    """Tokens with their logprobs, as Chat Completions and Responses write them."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in tokens
    ]


def answer_message(answer: Answer) -> ChatMessage:
    """The answer as a message of the history that continues it."""
    return ChatMessage("assistant", answer.text, answer.calls, (answer.reasoning or "").strip())


def data_event(data: Json, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
