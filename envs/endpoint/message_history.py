"""What was said in a session so far, and whether a request goes on from it.

Invariant: what is known is exactly what the tokens of the trajectory say, so a request that repeats it, and adds to
it, can be answered behind these tokens; any other cannot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.envs.endpoint.requests import ApiError, Call, ChatRequest, Said, bad_request
from penstock.envs.environment import Message
from penstock.envs.tools.functions import CALL_OPENING, describe_tools, parse_calls
from penstock.envs.tools.tool_environment import with_tools

Part = str | list[Message]
"""What is new: text, or chat messages. The first one is the whole prompt."""


class MessageHistory:
    """Grows by what was asked and answered."""

    def __init__(self) -> None:
        self._first: ChatRequest | None = None
        self._messages: tuple[Said, ...] = ()
        self._text = ""

    def next_part(self, asked: ChatRequest) -> Part:
        """What a request adds; nothing is kept before `answered`.

        Raises:
            ApiError: 400 `history_changed`.
        """
        if self._first is None:
            if asked.messages is None:
                return asked.prompt
            messages = [_rendered(message) for message in asked.messages]
            tools = [json.loads(tool) for tool in asked.tools]
            return with_tools(messages, describe_tools(tools)) if tools else messages
        if (asked.messages is None) != (self._first.messages is None):
            raise _history_changed(asked.param, "Chat and plain completions cannot be mixed.")
        if asked.tools != self._first.tools:
            raise _history_changed("tools", "The tools differ from those of the first request.")
        if asked.messages is None:
            if not asked.prompt.startswith(self._text):
                raise _history_changed("prompt", f"The prompt does not begin with {_tail(self._text)}, what was said.")
            return asked.prompt.removeprefix(self._text)
        return [_rendered(one) for one in self._new_messages(asked.messages)]

    def answered(self, asked: ChatRequest, text: str, sampled: str, reasoning: str | None = None) -> None:
        """Keep a request and its answer.

        Args:
            asked: The request.
            text: As it was delivered.
            sampled: Text of the sampled tokens, which goes on behind a stop text.
            reasoning: Delivered beside the text. The next request may repeat it or leave it out: the tokens keep it.
        """
        self._first = self._first or asked
        if asked.messages is None:
            self._text = asked.prompt + sampled
            return
        content, calls = split_answer(asked, text)
        self._messages = (*asked.messages, Said("assistant", content.strip(), tuple(calls), (reasoning or "").strip()))

    def _new_messages(self, messages: Sequence[Said]) -> Sequence[Said]:
        for index, (known, now) in enumerate(zip(self._messages, messages, strict=False)):
            if known != now and known._replace(reasoning="") != now:
                what = f"messages[{index}] is {_tail(str(tuple(now)))}, but was {_tail(str(tuple(known)))}."
                raise _history_changed(f"messages[{index}]", what)
        if len(messages) <= len(self._messages):
            what = f"There are {len(messages)} messages, of which none is new after the {len(self._messages)} so far."
            raise _history_changed("messages", what)
        return messages[len(self._messages) :]


def _history_changed(param: str, what: str) -> ApiError:
    """400: the request does not go on from the dialogue of its session."""
    return bad_request(
        f"{what} A session is one dialogue, whose tokens are recorded as they were sampled: each request has to repeat "
        "all that was said, unchanged, and add to it.",
        param,
        "history_changed",
    )


def split_answer(asked: ChatRequest, text: str) -> tuple[str, list[Call]]:
    """Text and tool calls of an answer. It stays text as a whole if no tools were given, or one call is malformed."""
    calls = parse_calls(text) if asked.tools else []
    if not calls or any(call.problem for call in calls):
        return text, []
    before = text.partition(CALL_OPENING)[0]
    return before.strip(), [Call(call.name, json.dumps(call.arguments, sort_keys=True)) for call in calls]


def _rendered(message: Said) -> Message:
    """As a chat template gets it; calls in the form in which the policy writes them.

    Raises:
        ApiError: 400, if it has reasoning, which templates render in ways of their own.
    """
    if message.reasoning:
        what = "'reasoning_content' is only supported where it repeats what the policy thought in this session."
        raise bad_request(what, "messages", "unsupported_value")
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.calls
    ]
    return {"role": message.role, "content": "\n".join([*([message.content] if message.content else []), *calls])}


def _tail(text: str) -> str:
    return repr(text if len(text) <= 120 else "…" + text[-120:])
