"""Anthropic's Messages: bodies of requests, answers, streams and errors.

    POST /v1/messages

A message is a list of blocks: text, thinking, tool_use, tool_result. Blocks of one message that follow one another are
one chat message, except results of tools, which are one message each.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from penstock.envs.endpoint.answers import AnswerReader, data_event
from penstock.envs.endpoint.requests import (
    MODEL,
    ApiError,
    Body,
    Call,
    Caller,
    ChatMessage,
    ChatRequest,
    Json,
    Part,
    bad_request,
    check_asks,
    is_ignored,
    joined,
    parsed,
    text_of,
    tool_text,
    validated,
)
from penstock.envs.endpoint.session import Answer, Piece

MAX_STOPS = 16
SIGNATURE = "penstock"
"""Of every thinking block; programs send it back, and it is not read."""
_OFF: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "thread": (),
}
"""Parameters that would change the answer or its input, with their neutral values other than null."""
_WITHOUT_MEANING = (
    "betas",
    "billing_policy",
    "cache_control",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "top_k": (),
    "thinking": (),
    "context_management": (),
    "compaction": (),
    "diagnostics": (),
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Status -> type of the error. Others below 500 are invalid requests."""


def _blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Text = Annotated[str, BeforeValidator(partial(text_of, separator="\n"))]


class _TextBlock(Part):
    text: str

    def to_chat_message(self, role: str) -> ChatMessage:
        return ChatMessage(role, self.text)


class _Thinking(Part):
    thinking: str

    def to_chat_message(self, role: str) -> ChatMessage:
        return ChatMessage(role, "", (), self.thinking.strip())


class _RedactedThinking(Part):
    def to_chat_message(self, role: str) -> ChatMessage:
        return ChatMessage(role, "")


class _ToolUse(Part):
    name: str
    input: Json

    def to_chat_message(self, role: str) -> ChatMessage:
        return ChatMessage(role, "", (Call.of(self.name, self.input),))


class _ToolResult(Part):
    content: _Text = ""

    def to_chat_message(self, role: str) -> ChatMessage:  # noqa: ARG002  in this protocol it is the user's
        return ChatMessage("tool", self.content)


_Block = type[_TextBlock | _Thinking | _RedactedThinking | _ToolUse | _ToolResult]
_BLOCKS: dict[str, dict[str, _Block]] = {
    "system": {"text": _TextBlock},
    "user": {"text": _TextBlock, "tool_result": _ToolResult},
    "assistant": {
        "text": _TextBlock,
        "thinking": _Thinking,
        "redacted_thinking": _RedactedThinking,
        "tool_use": _ToolUse,
    },
}


class _Message(Part):
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Json], BeforeValidator(_blocks)]

    def to_chat_messages(self, at: str) -> Iterator[ChatMessage]:
        """The messages of its blocks.

        Raises:
            ApiError: 400 with the block.
        """
        kinds = _BLOCKS[self.role]
        for index, block in enumerate(self.content):
            kind, place = str(block.get("type")), f"{at}.content[{index}]"
            if kind not in kinds:
                message = (
                    f"Blocks of type {kind[:40]!r} are not supported in messages of the role {self.role!r}; there are "
                    f"{', '.join(kinds)}."
                )
                raise bad_request(message, f"{place}.type", "unsupported_value")
            yield validated(kinds[kind], block, place).to_chat_message(self.role)
        if not self.content:
            yield ChatMessage(self.role, "")


class _Tool(Part):
    name: str
    description: str | None = None
    input_schema: Json
    strict: bool | None = None


class _Body(Body):
    messages: list[_Message]
    max_tokens: int = Field(ge=1)
    system: _Text = ""
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    output_config: Json | None = None


def parse_messages(body: Json, caller: Caller) -> MessageWriter:
    """Parse a body of `/v1/messages`.

    Raises:
        ApiError: 400 with the parameter, or 404 for an unknown model.
    """
    asked, ignored = parsed(
        _Body, body, caller, off=_OFF, without_effect=_WITHOUT_EFFECT, without_meaning=_WITHOUT_MEANING
    )
    choice, output = asked.tool_choice or {}, asked.output_config or {}
    is_parallel = choice.get("disable_parallel_tool_use")
    if is_ignored("tool_choice.type", choice.get("type"), ("auto",), caller.ignore, "tool_choice"):
        ignored.append("tool_choice")
    if is_ignored("tool_choice.disable_parallel_tool_use", is_parallel, (False,), caller.ignore, "parallel_tool_calls"):
        ignored.append("tool_choice.disable_parallel_tool_use")
    if is_ignored("output_config.format", output.get("format"), (), caller.ignore, "response_format"):
        ignored.append("output_config.format")
    ignored += [f"output_config.{name}" for name in output if name != "format" and output[name] is not None]
    ignored += asked.given("temperature", "top_p")

    system = [ChatMessage("system", asked.system)] if asked.system else []
    messages = joined(
        one
        for index, message in enumerate(asked.messages)
        for one in joined(message.to_chat_messages(f"messages[{index}]"), ("system", "user", "assistant"))
    )
    check_asks(messages, "messages")
    tools, left_out = _declared(asked.tools or [])
    request = ChatRequest(
        messages=(*system, *messages),
        tools=tuple(tools),
        max_tokens=asked.max_tokens,
        stop=tuple(asked.stop_sequences or ()),
        is_stream=bool(asked.stream),
        ignored=(*ignored, *left_out),
    )
    return MessageWriter(request)


def _declared(tools: list[Json]) -> tuple[list[str], list[str]]:
    """The tools with a schema as texts, and the names of what is left out: those that Anthropic's servers define."""
    declared, left_out = [], []
    for index, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            left_out.append(f"tools.{tool['type']}")
            continue
        own = validated(_Tool, tool, f"tools[{index}]")
        declared.append(tool_text(own.name, own.description, own.input_schema))
        if own.strict:
            left_out.append("tools.strict")
    return declared, left_out


def anthropic_error(error: ApiError) -> Json:
    """The body of a refusal."""
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = str(error) if error.param is None or error.param in str(error) else f"{error.param}: {error}"
    details = {} if error.code is None else {"details": {"error_code": error.code}}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


class MessageWriter:
    """Writes the answer to one request, block by block. The body of an answer that is not streamed has these blocks."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self._reader = AnswerReader()
        self._id = f"msg_{uuid.uuid4().hex}"
        self._content: list[Json] = []
        self._open_kind = ""

    def whole(self, answer: Answer) -> Json:
        """The body of an answer that is not streamed."""
        for _ in self.end(answer):
            pass
        return self._message(**self._ending(answer), usage=_usage(answer))

    def begin(self) -> Iterator[bytes]:
        """The message, without blocks. The prompt is counted at the end."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = self._message(stop_reason=None, stop_sequence=None, usage=usage)
        yield _event("message_start", message=message)

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Text of the block that is open, or of a new one."""
        thought, text = self._reader.read(piece)
        yield from self._say("thinking", thought)
        yield from self._say("text", text)

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The rest of the text, the tool calls, and why the turn ended."""
        rest = self._reader.finish(answer)
        yield from self._say("thinking", rest.reasoning)
        yield from self._say("text", rest.text)
        yield from self._close()
        for call in rest.calls:
            yield from self._call(call)
        yield _event("message_delta", delta=self._ending(answer), usage=_usage(answer))
        yield _event("message_stop")

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """The error as an event."""
        yield data_event(anthropic_error(error), "error")

    def _say(self, kind: Literal["thinking", "text"], delta: str) -> Iterator[bytes]:
        if not delta:
            return
        if self._open_kind != kind:
            yield from self._close()
            self._open_kind = kind
            yield self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._content[-1][kind] += delta
        yield self._delta({"type": f"{kind}_delta", kind: delta})

    def _close(self) -> Iterator[bytes]:
        """The end of the block that is open, if there is one."""
        if self._open_kind == "thinking":
            self._content[-1]["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open_kind:
            self._open_kind = ""
            yield _event("content_block_stop", index=len(self._content) - 1)

    def _call(self, call: Call) -> Iterator[bytes]:
        """A tool call is known when it is complete, so its input is one delta."""
        block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name}
        yield self._start({**block, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        self._content[-1]["input"] = json.loads(call.arguments)
        yield _event("content_block_stop", index=len(self._content) - 1)

    def _start(self, block: Json) -> bytes:
        self._content.append(block)
        return _event("content_block_start", index=len(self._content) - 1, content_block=block)

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _message(self, **ending: object) -> Json:
        fields = {"id": self._id, "type": "message", "role": "assistant", "model": MODEL, "content": self._content}
        return {**fields, **ending}

    def _ending(self, answer: Answer) -> Json:
        """Why the turn ended. A stop text of the request is the reason if it was sampled: it ends the turn."""
        if any(block["type"] == "tool_use" for block in self._content):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if answer.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        sampled = [stop for stop in self.request.stop if stop in answer.sampled_text]
        if sampled:
            return {"stop_reason": "stop_sequence", "stop_sequence": min(sampled, key=answer.sampled_text.find)}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(answer: Answer) -> Json:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "output_tokens": answer.num_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _event(name: str, **fields: object) -> bytes:
    return data_event({"type": name, **fields}, name)
