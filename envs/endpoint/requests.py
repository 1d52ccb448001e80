"""What a request is, whatever protocol it came in, and how one is refused: by the name of the parameter.

Each protocol (chat_api.py, responses_api.py, messages_api.py) translates its own bodies to a `ChatRequest`, so
sessions, histories and tokens know one form of request only.

Invariant: a parameter that the policy cannot follow is never dropped silently. It is refused, or named in the header of
the answer.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.envs.config import Ignorable

Json = dict[str, Any]
MODEL = "policy"
"""Name of the only model."""
MAX_SAFE_INTEGER = 2**53
"""JavaScript writes whole numbers below this without a point."""
MAX_STORED = 64
"""Responses of one session that may be continued by `previous_response_id`."""


class ApiError(Exception):
    """One refused request. Each protocol writes it in its own form.

    Args:
        status: HTTP status.
        message: Human-readable message.
        code: Machine-readable reason.
        param: The parameter that caused it.
        kind: Class of the reason, as OpenAI names it.
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
        self.code = code
        self.param = param
        self.kind = kind


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

    @classmethod
    def of(cls, name: str, arguments: str | Json) -> Self:
        """The call with normalized arguments, for comparisons; text that is not JSON is unchanged."""
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
            return cls(name, json.dumps(_plain_numbers(value), sort_keys=True))
        except (ValueError, RecursionError):
            return cls(name, str(arguments))


def _plain_numbers(value: Any) -> Any:
    """1.0 as 1, as programs in JavaScript write it."""
    if isinstance(value, dict):
        return {name: _plain_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(one) for one in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < MAX_SAFE_INTEGER
    return int(value) if is_whole else value


class ChatMessage(NamedTuple):
    """One chat message, with its text as the program or the policy wrote it."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request."""

    messages: tuple[ChatMessage, ...] | None = None
    """Messages of a chat; None for a plain completion."""
    prompt: str = ""
    """Prompt of a plain completion."""
    tools: tuple[str, ...] = ()
    """Tools, each as JSON text."""
    max_tokens: int | None = None
    """Limit of the caller."""
    stop: tuple[str, ...] = ()
    is_stream: bool = False
    wants_usage: bool = False
    wants_logprobs: bool = False
    ignored: tuple[str, ...] = ()
    """Parameters that have no effect."""
    param: str = "messages"
    """Name of the parameter with the text, for errors."""

    @property
    def tool_schemas(self) -> list[Json]:
        """The tools as objects."""
        return [json.loads(tool) for tool in self.tools]


class StoredHistories:
    """Histories that end with an answer, by the id of the response. One object belongs to one session and ends with it.

    The newest `MAX_STORED` are kept. Each was answered, so its text fits into `env.episode.max_tokens`.
    """

    def __init__(self) -> None:
        self._histories: OrderedDict[str, tuple[ChatMessage, ...]] = OrderedDict()

    def add(self, response_id: str, messages: Sequence[ChatMessage]) -> None:
        """Keep a history, and forget the oldest if there are too many."""
        self._histories[response_id] = tuple(messages)
        if len(self._histories) > MAX_STORED:
            self._histories.popitem(last=False)

    def find(self, response_id: str) -> tuple[ChatMessage, ...]:
        """The history that ends with a response.

        Raises:
            ApiError: 400 `previous_response_not_found`.
        """
        if response_id not in self._histories:
            message = (
                f"Previous response with id {response_id[:100]!r} not found. A session keeps its newest {MAX_STORED}, "
                "without those of store=false. Send the whole input instead."
            )
            raise bad_request(message, "previous_response_id", "previous_response_not_found")
        return self._histories[response_id]


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known about the caller when its request is parsed."""

    ignore: Collection[str] = ()
    """`env.endpoint.ignore`."""
    stored: StoredHistories = field(default_factory=StoredHistories)
    """Responses of its session."""


class Body(BaseModel):
    """The parameters of a request; each protocol adds its own. A parameter that is not here is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)

    def given(self, *names: str) -> list[str]:
        """Those of the parameters that the request has."""
        return [name for name in names if getattr(self, name) is not None]


class Part(BaseModel):
    """A part of a history. Programs send answers back with fields of their own, which are not read."""

    model_config = ConfigDict(extra="ignore", strict=True)


_Kind = TypeVar("_Kind", bound=BaseModel)
_Body = TypeVar("_Body", bound=Body)


def validated(kind: type[_Kind], value: object, at: str = "") -> _Kind:
    """The value as `kind`; `at` is its place in the body.

    Raises:
        ApiError: 400 with the parameter.
    """
    try:
        return kind.model_validate(value)
    except UnicodeEncodeError as error:  # of a name or a choice; half of a surrogate pair is in no other text either
        raise bad_request(f"Half of a surrogate pair is no character: {error.reason}.", at or None) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        param = (at + path).lstrip(".")
        if first["type"] == "extra_forbidden":
            refused = bad_request(f"Unknown parameter: {param!r}.", param, "unknown_parameter")
        elif first["type"] == "missing":
            refused = bad_request(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
        else:
            refused = bad_request(f"Invalid value for {param!r}: {first['msg']}.", param, "invalid_value")
        raise refused from error


def is_ignored(
    param: str, value: object, neutral: Sequence[object], ignore: Collection[str], key: str | None = None
) -> bool:
    """Whether an unsupported parameter is in the request, and has no effect since the user said so.

    Args:
        param: Its name in this protocol.
        value: Its value; None if it is not given.
        neutral: Values that ask for nothing, the default first.
        ignore: `env.endpoint.ignore`.
        key: Its name in `env.endpoint.ignore`; None: as `param`.

    Raises:
        ApiError: 400 `unsupported_value`, if it asks for something and is not to be ignored.
    """
    if value is None or value in neutral:
        return False
    if (key := key or param) in ignore:
        return True
    advice = f"; leave it out, or say {json.dumps(neutral[0])}" if neutral else "; leave it out"
    if key in get_args(Ignorable):
        advice += f". env.endpoint.ignore=[{key}] accepts it without effect: the policy is not made to follow it"
    message = f"Unsupported value: {param}={json.dumps(value)[:100]} is not supported here{advice}."
    raise bad_request(message, param, "unsupported_value")


def parsed(
    kind: type[_Body],
    body: Json,
    caller: Caller,
    *,
    off: Mapping[str, Sequence[object]],
    without_effect: Mapping[str, Sequence[object]],
    without_meaning: Collection[str],
) -> tuple[_Body, list[str]]:
    """The parameters that have an effect, and the names of those that have none.

    Args:
        kind: The former.
        body: The body.
        caller: Whose request it is.
        off: Refused parameters, with their neutral values other than null.
        without_effect: Parameters that would change how the policy answers, with their neutral values.
        without_meaning: Parameters that change nothing about an answer.

    Raises:
        ApiError: 400 with the parameter, or 404 for an unknown model.
    """
    ignored = [name for name, neutral in off.items() if is_ignored(name, body.get(name), neutral, caller.ignore)]
    ignored += [name for name, neutral in without_effect.items() if body.get(name) not in (None, *neutral)]
    taken = {*off, *without_effect, *without_meaning}
    asked = validated(kind, {name: value for name, value in body.items() if name not in taken})
    check_model(asked.model)
    return asked, ignored


def text_of(content: object, *, kinds: Sequence[str] = ("text",), separator: str = "") -> str:
    """Text of a content, which is a text or parts that all are texts, of one of the types `kinds`.

    Raises:
        ValueError: If it is anything else, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        others = {str(part.get("type"))[:40] for part in content}.difference(kinds)
        if not others and all(isinstance(part.get("text"), str) for part in content):
            return separator.join(part["text"] for part in content)
        found = ", ".join(sorted(others)) or "no text"
        raise ValueError(f"only parts of type {', '.join(map(repr, kinds))} are supported, got {found}")
    raise ValueError(f"expected a string or an array of parts, got {type(content).__name__}")


def tool_text(name: str, description: str | None, parameters: Json | None) -> str:
    """A tool as JSON text, as chat templates expect it."""
    function = {"name": name, "description": description, "parameters": parameters}
    given = {key: value for key, value in function.items() if value is not None}
    return json.dumps({"type": "function", "function": given})


def joined(messages: Iterable[ChatMessage], roles: Collection[str] = ("assistant",)) -> tuple[ChatMessage, ...]:
    """Join adjacent messages of one role: some protocols send a message in parts."""
    found: list[ChatMessage] = []
    for one in messages:
        if found and found[-1].role == one.role and one.role in roles:
            last = found.pop()
            content, reasoning = _lines(last.content, one.content), _lines(last.reasoning, one.reasoning)
            one = ChatMessage(one.role, content, last.calls + one.calls, reasoning)
        found.append(one)
    return tuple(found)


def _lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


def check_asks(messages: Sequence[ChatMessage], param: str) -> None:
    """Check that there is something to answer.

    Raises:
        ApiError: 400, if there is no message or the last one is the assistant's.
    """
    if not messages:
        raise bad_request("there is no message to answer", param, "invalid_value")
    if messages[-1].role == "assistant":
        raise bad_request("the last message is the assistant's: there is nothing to answer", param)
