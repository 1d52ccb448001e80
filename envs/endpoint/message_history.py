"""The messages of a session so far, and whether a request continues them.

Invariant: the history is exactly the text of the trajectory's tokens. So only a request that repeats the history and
adds messages can be answered as a continuation of these tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.envs.endpoint.requests import ApiError, Call, ChatMessage, ChatRequest, bad_request
from penstock.envs.environment import Message
from penstock.envs.tools.functions import CALL_OPENING, parse_calls

NewContent = str | list[Message]
"""The text or chat messages that a request adds to the history, without tools; the first adds the whole prompt."""


class MessageHistory:
    """The requests and answers of one session."""

    def __init__(self) -> None:
        self._first: ChatRequest | None = None
        self._messages: tuple[ChatMessage, ...] = ()
        self._text = ""

    def new_content(self, request: ChatRequest) -> NewContent:
        """The text or messages that a request adds. The history changes only in `record`.

        Raises:
            ApiError: 400 `history_changed`.
        """
        if self._first is None:
            if request.messages is None:
                return request.prompt
            return [_rendered(message) for message in request.messages]
        if (request.messages is None) != (self._first.messages is None):
            raise _history_changed(request.param, "Chat and plain completions cannot be mixed.")
        if request.tool_schemas != self._first.tool_schemas:  # in any order of their keys
            raise _history_changed("tools", "The tools differ from those of the first request.")
        if request.messages is None:
            if not request.prompt.startswith(self._text):
                raise _history_changed(
                    "prompt", f"The prompt does not begin with the earlier text {_tail(self._text)}."
                )
            return request.prompt.removeprefix(self._text)
        return [_rendered(one) for one in self._new_messages(request.messages)]

    def record(self, request: ChatRequest, text: str, sampled: str, reasoning: str | None = None) -> None:
        """Add a request and its answer.

        Args:
            request: The request.
            text: Delivered text.
            sampled: Text of all sampled tokens, which may extend past a stop text.
            reasoning: Delivered reasoning. The next request may repeat it or leave it out: the tokens keep it.
        """
        self._first = self._first or request
        if request.messages is None:
            self._text = request.prompt + sampled
            return
        content, calls = split_answer(request, text)
        answer = ChatMessage("assistant", content.strip(), tuple(calls), (reasoning or "").strip())
        self._messages = (*request.messages, answer)

    def _new_messages(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        for index, (known, now) in enumerate(zip(self._messages, messages, strict=False)):
            if known != now and known._replace(reasoning="") != now:
                what = f"messages[{index}] is {_tail(str(tuple(now)))}, but was {_tail(str(tuple(known)))}."
                raise _history_changed(f"messages[{index}]", what)
        if len(messages) <= len(self._messages):
            what = f"There are {len(messages)} messages, of which none is new after the {len(self._messages)} so far."
            raise _history_changed("messages", what)
        return messages[len(self._messages) :]


def _history_changed(param: str, what: str) -> ApiError:
    """400: the request does not continue the conversation of its session."""
    return bad_request(
        f"{what} A session is one conversation, whose tokens are recorded as they were sampled: each request has to "
        "repeat all earlier messages unchanged and add to them.",
        param,
        "history_changed",
    )


def split_answer(request: ChatRequest, text: str) -> tuple[str, list[Call]]:
    """Text and tool calls of an answer. All of it is text if no tools were given, or if one call is malformed."""
    calls = parse_calls(text) if request.tools else []
    if not calls or any(call.problem for call in calls):
        return text, []
    before = text.partition(CALL_OPENING)[0]
    return before.strip(), [Call(call.name, json.dumps(call.arguments, sort_keys=True)) for call in calls]


def _rendered(message: ChatMessage) -> Message:
    """The message for a chat template, with calls in the policy's own format.

    Raises:
        ApiError: 400, if it has reasoning, which each template renders differently.
    """
    if message.reasoning:
        what = "'reasoning_content' is only supported if it repeats the policy's own reasoning in this session."
        raise bad_request(what, "messages", "unsupported_value")
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.calls
    ]
    return {"role": message.role, "content": "\n".join([*([message.content] if message.content else []), *calls])}


def _tail(text: str) -> str:
    return repr(text if len(text) <= 120 else "…" + text[-120:])
