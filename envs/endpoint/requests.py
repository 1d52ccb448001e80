"""Parses and checks bodies of requests; a refusal names the parameter, in the format of the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

MODEL = "policy"
"""Name of the only model."""
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
_IGNORED = ("temperature", "top_p", "seed")


class ApiError(Exception):
    """One refused request.

    Args:
        status: HTTP status.
        message: Human-readable message.
        code: Machine-readable reason.
        param: The parameter that caused it.
        kind: `type` in the body.

    Attributes:
        body: Body of the answer, in the format of the API.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be answered as it is."""
    return ApiError(400, message, param=param, code=code)


class BudgetError(ApiError):
    """400: a budget of the episode is exhausted. After 429 many programs repeat a request for minutes."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(400, message, code=code, param=param)


def too_many_turns(max_turns: int) -> BudgetError:
    """The episode has used all its turns."""
    return BudgetError(f"This session has had its {max_turns} answers (env.episode.max_turns).", "max_turns")


def check_model(name: str) -> None:
    """Check the name of the model.

    Raises:
        ApiError: 404, for an unknown model.
    """
    if name != MODEL:
        message = (
            f"The model {name[:100]!r} does not exist or you do not have access to it; this endpoint has {MODEL!r}."
        )
        raise ApiError(404, message, param="model", code="model_not_found")


class Call(NamedTuple):
    """One tool call; `arguments` is JSON text with sorted keys."""

    name: str
    arguments: str


class ChatMessage(NamedTuple):
    """One chat message, with its text stripped for comparisons."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request.

    Attributes:
        messages: Messages of a chat; None for a plain completion.
        prompt: Prompt of a plain completion.
        tools: Tools, each as JSON text.
        max_tokens: Limit of the caller.
        ignored: Parameters that have no effect.
    """

    messages: tuple[ChatMessage, ...] | None = None
    prompt: str = ""
    tools: tuple[str, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    is_stream: bool = False
    wants_usage: bool = False
    wants_logprobs: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def param(self) -> str:
        """Name of the parameter with the text, for errors."""
        return "prompt" if self.messages is None else "messages"

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as objects."""
        return [json.loads(tool) for tool in self.tools]


def _to_text(content: object) -> str:
    """Content of a message: text, or parts that are all text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {str(part.get("type")) for part in content} - {"text"}
        if not kinds and all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        raise ValueError(f"only parts of type 'text' are supported, got {', '.join(sorted(kinds)) or 'no text'}")
    raise ValueError(f"expected a string or an array of parts, got {type(content).__name__}")


def _to_stops(stop: object) -> list[str]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops) or len(stops) > MAX_STOPS:
        raise ValueError(f"expected a string, or an array of at most {MAX_STOPS}, none of them empty")
    return stops


def _one_prompt(prompt: object) -> str:
    if isinstance(prompt, str):
        return prompt
    raise ValueError(f"only one text is supported, got {type(prompt).__name__}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Function(_Part):
    name: str
    arguments: str

    def call(self) -> Call:
        """The call with normalized arguments, for comparisons; text that is not JSON is unchanged."""
        try:
            return Call(self.name, json.dumps(json.loads(self.arguments), sort_keys=True))
        except (ValueError, RecursionError):
            return Call(self.name, self.arguments)


class _ToolCall(_Part):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function
    index: int | None = None


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_to_text)] = ""
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _nothing_else(self) -> Self:
        """Refuse unknown fields, except empty ones: clients send answers back with all their fields."""
        unknown = [name for name, value in (self.model_extra or {}).items() if value not in (None, [], {})]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not supported")
        return self

    def to_chat_message(self) -> ChatMessage:
        role = "system" if self.role == "developer" else self.role
        calls = tuple(one.function.call() for one in self.tool_calls or ())
        return ChatMessage(role, self.content.strip(), calls, (self.reasoning_content or "").strip())


class _ToolFunction(_Part):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Part):
    type: Literal["function"]
    function: _ToolFunction


class _StreamOptions(_Part):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Body(_Part):
    model: str
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(_to_stops)] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None

    def to_request(self) -> ChatRequest:
        """The fields common to both kinds of request."""
        check_model(self.model)
        return ChatRequest(
            max_tokens=self.max_tokens,
            stop=tuple(self.stop),
            is_stream=bool(self.stream),
            wants_usage=bool(self.stream_options and self.stream_options.include_usage),
            ignored=tuple(name for name in _IGNORED if getattr(self, name) is not None),
        )


class _Chat(_Body):
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] = Field(default_factory=list)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None


class _Completion(_Body):
    prompt: Annotated[str, BeforeValidator(_one_prompt)]
    logprobs: Literal[0] | None = None


def parse_chat(body: object) -> ChatRequest:
    """Parse a body of `/v1/chat/completions`.

    Raises:
        ApiError: 400 with the parameter, or 404 for an unknown model.
    """
    chat = _validated(_Chat, body)
    common = chat.to_request()
    if chat.messages[-1].role == "assistant":
        raise bad_request("the last message is the assistant's: there is nothing to answer", "messages")
    limits = [limit for limit in (chat.max_tokens, chat.max_completion_tokens) if limit is not None]
    tools = [json.dumps(tool.model_dump(exclude={"function": {"strict"}}, exclude_none=True)) for tool in chat.tools]
    strict = ("tools.strict",) if any(tool.function.strict for tool in chat.tools) else ()
    return replace(
        common,
        messages=tuple(message.to_chat_message() for message in chat.messages),
        tools=tuple(tools),
        max_tokens=min(limits, default=None),
        wants_logprobs=bool(chat.logprobs),
        ignored=common.ignored + strict,
    )


def parse_completion(body: object) -> ChatRequest:
    """Parse a body of `/v1/completions`.

    Raises:
        ApiError: 400 with the parameter, or 404 for an unknown model.
    """
    completion = _validated(_Completion, body)
    return replace(completion.to_request(), prompt=completion.prompt, wants_logprobs=completion.logprobs is not None)


_Kind = TypeVar("_Kind", bound=_Body)


def _validated(kind: type[_Kind], body: object) -> _Kind:
    if not isinstance(body, Mapping):
        raise bad_request(f"expected a JSON object, got {type(body).__name__}")
    for name, neutral in _OFF.items():
        if body.get(name) is not None and body[name] not in neutral:
            default = f"; leave it out, or say {json.dumps(neutral[0])}" if neutral else "; leave it out"
            message = f"Unsupported value: {name}={json.dumps(body[name])[:100]} is not supported here{default}."
            raise bad_request(message, name, "unsupported_value")
    rest = {name: value for name, value in body.items() if name not in _OFF and name not in _WITHOUT_MEANING}
    try:
        return kind.model_validate(rest)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unknown parameter: {param!r}.", param, "unknown_parameter")
    if first["type"] == "missing":
        return bad_request(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
    return bad_request(f"Invalid value for {param!r}: {first['msg']}.", param, "invalid_value")
