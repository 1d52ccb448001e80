"""OpenAI's Responses: bodies of requests, answers and streams. Errors are those of chat_api.py.

    POST /v1/responses, with the whole input each time, or with `previous_response_id`

An answer is a list of items: reasoning, a message, function calls. What comes back as adjacent items is one message of
the assistant again, equal to the one that was recorded.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from penstock.envs.endpoint.answers import AnswerReader, answer_message, data_event, token_logprobs
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
    StoredHistories,
    bad_request,
    check_asks,
    is_ignored,
    joined,
    parsed,
    text_of,
    tool_text,
    validated,
)
from penstock.envs.endpoint.session import Answer, Piece, SampledToken

_OFF: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
}
"""Parameters that would change the answer or its input, with their neutral values other than null."""
_WITHOUT_MEANING = (
    "access_programs",
    "background_options",
    "client_metadata",
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream_options",
    "user",
)
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {"reasoning": (), "truncation": ("disabled",)}
_LOGPROBS = "message.output_text.logprobs"


def _items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(partial(text_of, kinds=("input_text", "output_text", "text"), separator="\n"))]


class _InputMessage(Part):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text

    def to_chat_message(self) -> ChatMessage:
        return ChatMessage("system" if self.role == "developer" else self.role, self.content)


class _FunctionCall(Part):
    name: str
    arguments: str

    def to_chat_message(self) -> ChatMessage:
        return ChatMessage("assistant", "", (Call.of(self.name, self.arguments),))


class _FunctionOutput(Part):
    output: _Text

    def to_chat_message(self) -> ChatMessage:
        return ChatMessage("tool", self.output)


class _Reasoning(Part):
    content: Annotated[str, BeforeValidator(partial(text_of, kinds=("reasoning_text",), separator="\n"))] = ""

    def to_chat_message(self) -> ChatMessage:
        return ChatMessage("assistant", "", (), self.content.strip())


_ITEMS: dict[str, type[_InputMessage | _FunctionCall | _FunctionOutput | _Reasoning]] = {
    "message": _InputMessage,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionOutput,
    "reasoning": _Reasoning,
}


class _Function(Part):
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class _Body(Body):
    input: Annotated[list[Json], BeforeValidator(_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[Json] | None = None
    text: Json | None = None


def parse_response(body: Json, caller: Caller) -> ResponseWriter:
    """Parse a body of `/v1/responses`.

    Raises:
        ApiError: 400 with the parameter, or 404 for an unknown model.
    """
    asked, ignored = parsed(
        _Body, body, caller, off=_OFF, without_effect=_WITHOUT_EFFECT, without_meaning=_WITHOUT_MEANING
    )
    text = asked.text or {}
    if is_ignored("text.format", text.get("format"), ({"type": "text"},), caller.ignore, "response_format"):
        ignored.append("text.format")
    ignored += [f"text.{name}" for name in text if name != "format" and text[name] is not None]
    ignored += asked.given("temperature", "top_p")

    earlier = () if asked.previous_response_id is None else caller.stored.find(asked.previous_response_id)
    given = [_message_of(item, f"input[{index}]") for index, item in enumerate(asked.input)]
    messages = joined((*earlier, *given))
    check_asks(messages, "input")
    system = [ChatMessage("system", asked.instructions)] if asked.instructions else []
    tools, left_out = _declared(asked.tools or [])
    request = ChatRequest(
        messages=(*system, *messages),
        tools=tuple(tools),
        max_tokens=asked.max_output_tokens,
        is_stream=bool(asked.stream),
        wants_logprobs=_LOGPROBS in (asked.include or ()),
        ignored=(*ignored, *left_out),
        param="input",
    )
    # Instructions are not carried over to the response that continues this one.
    return ResponseWriter(request, asked, messages, None if asked.store is False else caller.stored)


def _message_of(item: Json, at: str) -> ChatMessage:
    kind = str(item.get("type", "message"))
    if kind not in _ITEMS:
        message = f"Items of type {kind[:40]!r} are not supported; there are {', '.join(_ITEMS)}."
        raise bad_request(message, f"{at}.type", "unsupported_value")
    return validated(_ITEMS[kind], item, at).to_chat_message()


def _declared(tools: list[Json]) -> tuple[list[str], list[str]]:
    """The functions among the tools as texts, and the names of what is left out."""
    functions, left_out = [], []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            left_out.append(f"tools.{tool.get('type')}")
            continue
        function = validated(_Function, tool, f"tools[{index}]")
        functions.append(tool_text(function.name, function.description, function.parameters))
        if function.strict:
            left_out.append("tools.strict")
    return functions, left_out


class ResponseWriter:
    """Writes the answer to one request, item by item. The body of an answer that is not streamed is that of the last
    event of a stream.

    Args:
        request: The request.
        asked: Its body, of which the answer repeats some values.
        messages: Its history, without instructions.
        stored: Takes the history with the answer; None: it is not kept.
    """

    def __init__(
        self, request: ChatRequest, asked: _Body, messages: tuple[ChatMessage, ...], stored: StoredHistories | None
    ) -> None:
        self.request = request
        self._asked = asked
        self._messages = messages
        self._stored = stored
        self._reader = AnswerReader()
        self._id = uuid.uuid4().hex
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._output: list[Json] = []
        self._open_kind = ""
        self._final: Json = {}

    def whole(self, answer: Answer) -> Json:
        """The body of an answer that is not streamed."""
        for _ in self.end(answer):
            pass
        return self._final

    def begin(self) -> Iterator[bytes]:
        """The response, without items."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Text of the item that is open, or of a new one."""
        thought, text = self._reader.read(piece)
        yield from self._say("reasoning", thought)
        yield from self._say("message", text)

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The rest of the text, the function calls, and the whole response."""
        rest = self._reader.finish(answer)
        status = "incomplete" if rest.finish_reason == "length" else "completed"
        yield from self._say("reasoning", rest.reasoning)
        yield from self._say("message", rest.text)
        if not rest.calls and self._open_kind != "message":
            yield from self._open("message")  # empty; it comes back as the assistant's message that it is
        yield from self._close(status, answer.tokens if self.request.wants_logprobs else ())
        for call in rest.calls:
            yield from self._call(call)
        if self._stored is not None:
            self._stored.add(f"resp_{self._id}", (*self._messages, answer_message(answer)))
        self._final = self._response(status, answer)
        yield self._event(f"response.{status}", response=self._final)

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """The response as failed."""
        yield self._event("response.failed", response=self._response("failed", error=error))

    def _say(self, kind: Literal["reasoning", "message"], delta: str) -> Iterator[bytes]:
        if not delta:
            return
        if self._open_kind != kind:
            yield from self._open(kind)
        part = self._output[-1]["content"][0]
        part["text"] += delta
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{part['type']}.delta", **self._place(), delta=delta, **logprobs)

    def _open(self, kind: Literal["reasoning", "message"]) -> Iterator[bytes]:
        yield from self._close("completed")
        if kind == "message":
            item: Json = {"id": f"msg_{self._id}", "type": kind, "role": "assistant"}
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": f"rs_{self._id}", "type": kind, "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self._open_kind = kind
        self._output.append({**item, "status": "in_progress", "content": []})
        yield self._item_event("added")
        self._output[-1]["content"].append(part)
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _close(self, status: str, tokens: Sequence[SampledToken] = ()) -> Iterator[bytes]:
        """The end of the item that is open, if there is one."""
        if not self._open_kind:
            return
        part: Json = self._output[-1]["content"][0]
        logprobs: Json = {}
        if self._open_kind == "message":
            part["logprobs"] = token_logprobs(tokens)
            logprobs = {"logprobs": part["logprobs"]}
        self._open_kind = ""
        yield self._event(f"response.{part['type']}.done", **self._place(), text=part["text"], **logprobs)
        yield self._event("response.content_part.done", **self._place(), part=part)
        self._output[-1]["status"] = status
        yield self._item_event("done")

    def _call(self, call: Call) -> Iterator[bytes]:
        """A function call is known when it is complete, so its arguments are one delta."""
        unique = uuid.uuid4().hex[:24]
        item = {"id": f"fc_{unique}", "type": "function_call", "call_id": f"call_{unique}", "name": call.name}
        self._output.append({**item, "status": "in_progress", "arguments": ""})
        yield self._item_event("added")
        at = {"item_id": item["id"], "output_index": len(self._output) - 1}
        yield self._event("response.function_call_arguments.delta", **at, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **at, arguments=call.arguments)
        self._output[-1] = {**item, "status": "completed", "arguments": call.arguments}
        yield self._item_event("done")

    def _item_event(self, what: Literal["added", "done"]) -> bytes:
        index = len(self._output) - 1
        return self._event(f"response.output_item.{what}", output_index=index, item=self._output[index])

    def _place(self) -> Json:
        """Where the text of the newest item is."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _event(self, name: str, **fields: object) -> bytes:
        return data_event({"type": name, "sequence_number": next(self._numbers), **fields}, name)

    def _response(self, status: str, answer: Answer | None = None, error: ApiError | None = None) -> Json:
        """The response object, with the items so far."""
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": MODEL,
            "output": self._output,
            "error": None if error is None else {"code": _failure(error), "message": str(error)},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if answer is None else _usage(answer),
            "instructions": self._asked.instructions,
            "previous_response_id": self._asked.previous_response_id,
            "max_output_tokens": self._asked.max_output_tokens,
            "store": self._stored is not None,
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in self.request.tool_schemas],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "truncation": "disabled",
            "text": {"format": {"type": "text"}},
            "metadata": {},
        }


def _usage(answer: Answer) -> Json:
    """Tokens of the trajectory. Those of the reasoning are not counted separately."""
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
    }


def _failure(error: ApiError) -> str:
    """The reason in the words of the protocol, which has few."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
