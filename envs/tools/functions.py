"""Python functions as tools: schemas from their signatures, and calls parsed from the text of the model.

    def add(a: int, b: int) -> int:
        \"\"\"Add two numbers.\"\"\"
        return a + b

    Toolbox([add]).schemas()[0]["function"]["parameters"]["required"] == ["a", "b"]

Calls have the format of Hermes and Qwen: `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`, any
number of them in a turn. Mistakes of the model (invalid JSON, an unknown tool, invalid arguments, half of a surrogate
pair, which is no text), and exceptions and time-outs of a tool, are reported to the model and counted. They never end
the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, get_type_hints

from jsonschema import Draft202012Validator
from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from penstock.envs.environment import Message

Outcome = Literal["ok", "bad_json", "unknown_tool", "bad_arguments", "error", "timeout"]

CALL_OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
MAX_RESULT_CHARACTERS = 4000
_MAX_PROBLEMS = 5


class ToolError(Exception):
    """A call of a tool failed; the message is reported to the model."""

    def __init__(self, message: str, outcome: Outcome = "error") -> None:
        super().__init__(message)
        self.outcome = outcome


class ToolServerError(Exception):
    """The server of a tool died or hangs. That is not the model's fault, so the attempt fails."""


@dataclass(frozen=True, slots=True)
class DescribedTool:
    """A tool with its own schema, e.g. from an MCP server (mcp_tools.py)."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of its arguments."""
    call: Callable[[Mapping[str, Any]], Awaitable[str]]
    """Takes the arguments and applies its own time-out; may raise `ToolError` and `ToolServerError`."""


Tool = Callable[..., object] | DescribedTool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""
    """Why it is malformed; empty if it is well-formed."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call, as reported to the model."""

    outcome: Outcome
    text: str
    is_cut: bool = False
    """The result was longer, which the text says."""


def parse_calls(text: str) -> list[ToolCall]:
    """Every call in a turn, in order. The last one may lack its closing tag if its JSON is complete."""
    return [_parse(match.group(1).strip()) for match in _CALL.finditer(text)]


def _parse(body: str) -> ToolCall:
    form = 'write <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
    try:
        call = json.loads(body)
        # JSON may escape half of a surrogate pair (\\ud83d), which no tokenizer and no file takes.
        json.dumps(call, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        return ToolCall("", {}, f"{half} is half of a surrogate pair, which is no character; {form}")
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"not JSON ({error}); {form}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, f"no name; {form}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall("", {}, f"arguments is a {type(arguments).__name__}, not an object; {form}")
    return ToolCall(call["name"], arguments)


def hermes_text(content: str, calls: Iterable[tuple[str, str]]) -> str:
    """A turn with calls, each a name and arguments as JSON text, in the form that `parse_calls` reads."""
    written = [
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    ]
    return "\n".join([*([content] if content else []), *written])


def with_tools(messages: Sequence[Message], schemas: Iterable[Mapping[str, Any]]) -> list[Message]:
    """The messages, with the tools and the format of a call at the end of their system message.

    For policies whose chat template does not do this itself (rollout/tokenization/turn_template.py).
    """
    tools = "\n".join(json.dumps(schema) for schema in schemas)
    description = (
        f"You may call these functions:\n<tools>\n{tools}\n</tools>\nFor each call write\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )
    first, rest = messages[0], list(messages[1:])
    if first["role"] == "system":
        return [{"role": "system", "content": f"{first['content']}\n\n{description}"}, *rest]
    return [{"role": "system", "content": description}, first, *rest]


def asks_for_calls(text: str) -> bool:
    """Whether a text shows a call in the format that `parse_calls` reads, as chat templates of Qwen and Hermes do."""
    shown = re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", text, re.DOTALL)
    return any('"name"' in call and '"arguments"' in call for call in shown)


class Toolbox:
    """Tools by name.

    Args:
        tools: Functions, plain or asynchronous, with a type hint for each parameter and a docstring for the model; or
            tools with their own schema.
        timeout_s: Longest time for one call, seconds.
        max_result_characters: Characters of a result; further ones are left out, and their number is said.

    Raises:
        TypeError: If a parameter has no type hint, or two tools have the same name.
    """

    def __init__(
        self, tools: Iterable[Tool], timeout_s: float = 10.0, max_result_characters: int = MAX_RESULT_CHARACTERS
    ) -> None:
        self._max_characters = max_result_characters
        self._tools: dict[str, DescribedTool] = {}
        for tool in tools:
            described = _checked(tool) if isinstance(tool, DescribedTool) else _described(tool, timeout_s)
            if described.name in self._tools:
                raise TypeError(
                    f"two tools are named {described.name!r}; the model could not tell them apart. Rename one."
                )
            self._tools[described.name] = described

    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the format of OpenAI and of chat templates."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
            }
            for tool in self._tools.values()
        ]

    async def run(self, call: ToolCall) -> ToolResult:
        """Make one call and return its result, also after an error. A plain function runs in a thread, which keeps
        running after a time-out; only `env.episode.timeout_s` ends the process.

        Raises:
            ToolServerError: If the server of the tool died or hangs.
        """
        if call.problem:
            return ToolResult("bad_json", f"error: {call.problem}")
        if call.name not in self._tools:
            near = get_close_matches(call.name, self._tools, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            return ToolResult("unknown_tool", f"error: no tool {call.name!r:.60}; there are {list(self._tools)}.{hint}")
        outcome: Outcome = "ok"
        try:
            text = await self._tools[call.name].call(call.arguments)
        except ToolError as error:
            outcome, text = error.outcome, f"error: {error}"
        if num_more := max(0, len(text) - self._max_characters):
            text = f"{text[: self._max_characters]}… ({num_more} more characters)"
        # A tool may give what is no text, such as the name of a file that is not UTF-8; "?" stands for it.
        return ToolResult(outcome, text.encode(errors="replace").decode(), num_more > 0)


def _checked(tool: DescribedTool) -> DescribedTool:
    """The same tool, with its arguments validated against its schema before each call."""

    async def call(arguments: Mapping[str, Any]) -> str:
        wrong = [error.message for error in Draft202012Validator(tool.parameters).iter_errors(arguments)]
        if wrong:
            raise ToolError(f"{tool.name}: {'; '.join(wrong[:_MAX_PROBLEMS])}", "bad_arguments")
        return await tool.call(arguments)

    return replace(tool, call=call)


def _described(tool: Callable[..., object], timeout_s: float) -> DescribedTool:
    """A function with the schema of its signature; its exceptions are reported to the model."""
    name = getattr(tool, "__name__", type(tool).__name__)
    model = _argument_model(name, tool)

    async def call(arguments: Mapping[str, Any]) -> str:
        try:
            given = model.model_validate(arguments)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:_MAX_PROBLEMS])
            raise ToolError(f"{name}: {wrong}", "bad_arguments") from error
        parameters = {parameter: getattr(given, parameter) for parameter in model.model_fields}
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                if inspect.iscoroutinefunction(tool):
                    returned = await tool(**parameters)
                else:
                    returned = await asyncio.to_thread(tool, **parameters)
                if inspect.isawaitable(returned):  # a plain function around an asynchronous one
                    returned = await returned
            return returned if isinstance(returned, str) else json.dumps(returned, default=str, ensure_ascii=False)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            episode = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and episode is not None and episode.cancelling():
                raise  # the episode itself is cancelled, not only a task that the tool awaits
            if deadline.expired():
                raise ToolError(f"{name} took longer than {timeout_s:g} s", "timeout") from error
            raise ToolError(_describe(error)) from error

    return DescribedTool(name, inspect.getdoc(tool) or "", _plain_schema(model.model_json_schema()), call)


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  user code: its `__str__` may raise too
        return type(error).__name__


def _argument_model(name: str, tool: Callable[..., object]) -> Any:
    """A pydantic model of a function's parameters."""
    hints = get_type_hints(tool)
    parameters: dict[str, Any] = {}
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise TypeError(f"tool {name}{inspect.signature(tool)}: {parameter} cannot be named in a call. Name it.")
        if parameter.name not in hints:
            raise TypeError(
                f"tool {name}{inspect.signature(tool)}: parameter {parameter.name!r} has no type hint, so the model "
                "cannot be told what it takes. Write e.g. `: int`."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        TypeAdapter(hints[parameter.name])  # refuses a type without a schema now, not at the first call
        parameters[parameter.name] = (hints[parameter.name], default)
    return create_model(name, __config__=ConfigDict(extra="forbid"), **parameters)


def _plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """JSON schema without the titles that pydantic adds."""
    properties = {
        name: {key: value for key, value in part.items() if key != "title"}
        for name, part in schema.get("properties", {}).items()
    }
    kept = {key: value for key, value in schema.items() if key not in {"title", "additionalProperties"}}
    return {**kept, "properties": properties, "required": schema.get("required", [])}
