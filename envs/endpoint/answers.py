"""Bodies of answers, whole or as chunks of a stream, in the format of the OpenAI API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.envs.endpoint.message_history import split_answer
from penstock.envs.endpoint.requests import MODEL, Call, ChatRequest
from penstock.envs.endpoint.session import Answer, Piece, SampledToken
from penstock.envs.reasoning import num_begun
from penstock.envs.tools.functions import CALL_OPENING

Json = dict[str, Any]


class Writer:
    """Writes the answer to one request. In a stream, tool calls are held back until they are complete."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._is_chat = request.messages is not None
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sent = self._thought = self._held = ""
        self._has_begun = False

    def whole(self, answer: Answer) -> Json:
        """The body of an answer that is not streamed."""
        content, calls = split_answer(self._request, answer.text)
        choice: Json = {"index": 0, "finish_reason": "tool_calls" if calls else answer.finish_reason}
        if self._is_chat:
            message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
            thought = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning or None}
            choice["message"] = message | thought | ({"tool_calls": _tool_calls(calls)} if calls else {})
        else:
            choice["text"] = answer.text
        return self._body("", [{**choice, "logprobs": self._logprobs(answer.tokens)}], answer)

    def chunks(self, piece: Piece) -> Iterator[Json]:
        """The chunks for a piece of a stream."""
        if piece.reasoning:
            self._thought += piece.reasoning
            yield self._chunk("", delta={"reasoning_content": piece.reasoning})
        text = self._held + piece.text
        ready = text[: _end_of_text(text)] if self._request.tools else text
        self._held = text[len(ready) :]
        if ready or piece.tokens:
            yield self._chunk(ready, logprobs=self._logprobs(piece.tokens))

    def last_chunks(self, answer: Answer) -> Iterator[Json]:
        """The remaining chunks at the end of a stream."""
        calls = split_answer(self._request, answer.text)[1]
        thought = (answer.reasoning or "").removeprefix(self._thought)
        if thought:
            yield self._chunk("", delta={"reasoning_content": thought})
        rest = "" if calls else answer.text.removeprefix(self._sent)
        if rest:
            yield self._chunk(rest)
        for index, call in enumerate(_tool_calls(calls)):
            yield self._chunk("", delta={"tool_calls": [{"index": index, **call}]})
        yield self._chunk("", delta={}, finish_reason="tool_calls" if calls else answer.finish_reason)
        if self._request.wants_usage:
            yield self._body(".chunk", [], answer)

    def _chunk(
        self, text: str, *, delta: Json | None = None, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> Json:
        self._sent += text
        choice: Json = {"index": 0, "finish_reason": finish_reason, "logprobs": logprobs}
        if self._is_chat:
            role = {} if self._has_begun else {"role": "assistant"}
            choice["delta"] = role | ({"content": text} if delta is None else delta)
        else:
            choice["text"] = text
        self._has_begun = True
        return self._body(".chunk", [choice], None)

    def _body(self, suffix: str, choices: list[Json], answer: Answer | None) -> Json:
        """The common fields, with the token usage if the whole answer is given."""
        body: Json = {
            "id": self._id,
            "object": f"chat.completion{suffix}" if self._is_chat else "text_completion",
            "created": self._created,
            "model": MODEL,
            "choices": choices,
            "system_fingerprint": None if answer is None else f"policy-v{answer.version}",
        }
        if answer is not None:
            body["usage"] = {
                "prompt_tokens": answer.num_prompt_tokens,
                "completion_tokens": answer.num_tokens,
                "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
            }
        elif self._request.wants_usage:
            body["usage"] = None
        return body

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if not self._request.wants_logprobs or not tokens:
            return None
        if self._is_chat:
            return {
                "content": [
                    {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, logprob in tokens
                ],
                "refusal": None,
            }
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": None,
        }


def _end_of_text(text: str) -> int:
    """Position where a tool call begins, or where an incomplete opening tag begins."""
    begins = text.find(CALL_OPENING)
    return begins if begins >= 0 else len(text) - num_begun(text, [CALL_OPENING])


def _tool_calls(calls: Sequence[Call]) -> list[Json]:
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
