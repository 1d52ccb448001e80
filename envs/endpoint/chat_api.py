"""OpenAI's Chat Completions, and its older Completions: bodies of requests, answers, streams and errors.

POST /v1/chat/completions      POST /v1/completions
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from penstock.envs.endpoint.answers import AnswerReader, data_event, token_logprobs
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
    check_asks,
    parsed,
    text_of,
    tool_text,
)
from penstock.envs.endpoint.session import Answer, Piece, SampledToken

MAX_STOPS = 4
_OFF: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "echo": (False,),
    "suffix": ("",),
}
"""Parameters that would change the sampled tokens or their format, with their neutral values other than null."""
_WITHOUT_MEANING = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


def _to_stops(stop: object) -> list[str]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops) or len(stops) > MAX_STOPS:
        raise ValueError(f"expected a string, or an array of at most {MAX_STOPS}, none of them empty")
    return stops


def _one_prompt(prompt: object) -> str:
    texts = prompt if isinstance(prompt, list) else [prompt]
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    raise ValueError(
        f"only one text is supported, got {len(texts)}, of {sorted({type(one).__name__ for one in texts})}"
    )


class _Field(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Function(Part):
    name: str
    arguments: str


class _ToolCall(Part):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function
    index: int | None = None


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(text_of)] = ""
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _nothing_else(self) -> Self:
        """Refuse unknown fields, except empty ones, and those of answers that are sent back: clients add their own."""
        if self.role == "assistant":
            return self
        unknown = [name for name, value in (self.model_extra or {}).items() if value not in (None, [], {})]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not supported")
        return self

    def to_chat_message(self) -> ChatMessage:
        role = "system" if self.role == "developer" else self.role
        calls = tuple(Call.of(one.function.name, one.function.arguments) for one in self.tool_calls or ())
        return ChatMessage(role, self.content, calls, (self.reasoning_content or "").strip())


class _ToolFunction(_Field):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Field):
    type: Literal["function"]
    function: _ToolFunction


class _StreamOptions(_Field):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Body(Body):
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(_to_stops)] = Field(default_factory=list)
    stream_options: _StreamOptions | None = None
    seed: int | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class _Chat(_Body):
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] = Field(default_factory=list)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None


class _Completion(_Body):
    prompt: Annotated[str, BeforeValidator(_one_prompt)]
    logprobs: Literal[0] | None = None


def parse_chat(body: Json, caller: Caller) -> ChatWriter:
    """Parse a body of `/v1/chat/completions`.

    Raises:
        ApiError: 400 with the parameter, or 404 for an unknown model.
    """
    chat, ignored = parsed(_Chat, body, caller, off=_OFF, without_effect={}, without_meaning=_WITHOUT_MEANING)
    messages = tuple(message.to_chat_message() for message in chat.messages)
    check_asks(messages, "messages")
    limits = [limit for limit in (chat.max_tokens, chat.max_completion_tokens) if limit is not None]
    functions = [tool.function for tool in chat.tools]
    strict = ["tools.strict"] if any(function.strict for function in functions) else []
    request = ChatRequest(
        messages=messages,
        tools=tuple(tool_text(one.name, one.description, one.parameters) for one in functions),
        max_tokens=min(limits, default=None),
        stop=tuple(chat.stop),
        is_stream=bool(chat.stream),
        wants_usage=chat.wants_usage,
        wants_logprobs=bool(chat.logprobs),
        ignored=(*ignored, *chat.given("temperature", "top_p", "seed"), *strict),
    )
    return ChatWriter(request)


def parse_completion(body: Json, caller: Caller) -> ChatWriter:
    """Parse a body of `/v1/completions`.

    Raises:
        ApiError: 400 with the parameter, or 404 for an unknown model.
    """
    completion, ignored = parsed(
        _Completion, body, caller, off=_OFF, without_effect={}, without_meaning=_WITHOUT_MEANING
    )
    request = ChatRequest(
        prompt=completion.prompt,
        max_tokens=completion.max_tokens,
        stop=tuple(completion.stop),
        is_stream=bool(completion.stream),
        wants_usage=completion.wants_usage,
        wants_logprobs=completion.logprobs is not None,
        ignored=(*ignored, *completion.given("temperature", "top_p", "seed")),
        param="prompt",
    )
    return ChatWriter(request)


def openai_error(error: ApiError) -> Json:
    """The body of a refusal, of all protocols of OpenAI."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


class ChatWriter:
    """Writes the answer to a request of Chat Completions or Completions."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self._reader = AnswerReader()
        self._is_chat = request.messages is not None
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._has_begun = False

    def whole(self, answer: Answer) -> Json:
        """The body of an answer that is not streamed."""
        rest = self._reader.finish(answer)
        choice: Json = {"index": 0, "finish_reason": rest.finish_reason, "logprobs": self._logprobs(answer.tokens)}
        if self._is_chat:
            message = {"role": "assistant", "content": rest.text if rest.text or not rest.calls else None}
            thought = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning or None}
            calls = {"tool_calls": _tool_calls(rest.calls)} if rest.calls else {}
            choice["message"] = {**message, "refusal": None, **thought, **calls}
        else:
            choice["text"] = answer.text
        return self._body("", [choice], answer)

    def begin(self) -> Iterator[bytes]:
        """Nothing: the first chunk says that the stream has begun."""
        yield from ()

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """The chunks for a piece of a stream."""
        thought, text = self._reader.read(piece)
        if thought:
            yield self._chunk("", delta={"reasoning_content": thought})
        if text or piece.tokens:
            yield self._chunk(text, logprobs=self._logprobs(piece.tokens))

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The remaining chunks at the end of a stream."""
        rest = self._reader.finish(answer)
        if rest.reasoning:
            yield self._chunk("", delta={"reasoning_content": rest.reasoning})
        if rest.text:
            yield self._chunk(rest.text)
        for index, call in enumerate(_tool_calls(rest.calls)):
            yield self._chunk("", delta={"tool_calls": [{"index": index, **call}]})
        yield self._chunk("", delta={}, finish_reason=rest.finish_reason)
        if self.request.wants_usage:
            yield data_event(self._body(".chunk", [], answer))
        yield b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """The error, where a chunk would be."""
        yield data_event(openai_error(error))

    def _chunk(
        self, text: str, *, delta: Json | None = None, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> bytes:
        choice: Json = {"index": 0, "finish_reason": finish_reason, "logprobs": logprobs}
        if self._is_chat:
            role = {} if self._has_begun else {"role": "assistant"}
            choice["delta"] = role | ({"content": text} if delta is None else delta)
        else:
            choice["text"] = text
        self._has_begun = True
        return data_event(self._body(".chunk", [choice], None))

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
        elif self.request.wants_usage:
            body["usage"] = None
        return body

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if not self.request.wants_logprobs or not tokens:
            return None
        if self._is_chat:
            return {"content": token_logprobs(tokens), "refusal": None}
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": None,
        }


def _tool_calls(calls: Sequence[Call]) -> list[Json]:
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
