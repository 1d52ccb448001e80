"""Chat messages as rows hold them, in the form that chat templates take.

The form of OpenAI is accepted as it is. Templates take less, so that it is written in their way:

| in the row | as the template gets it |
|---|---|
| `content` null or absent, beside `tool_calls` | empty text |
| `content` as a list of text parts | their texts, joined |
| `arguments` of a call as JSON text | the object |
| a key of a message that is null, as SDKs write them; an empty list of `tool_calls` | left out |

Nulls below a message, such as an argument of a call, stay: a row that has one means it (row_files.py has the nulls that
a table adds).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
_KEYS = (("role", "content"), ("from", "value"))
"""Of OpenAI's messages, and of ShareGPT's, which are refused by name."""
_SYSTEM_ROLES = ("system", "developer")
MAX_DEPTH = 64
"""Levels of lists and objects in each other. What handles rows calls itself for each, up to Python's limit."""
TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


class MessageError(Exception):
    """What is wrong with the messages of a row."""


def messages_in(text: str) -> list[Any] | None:
    """The chat messages that a text holds as JSON, as columns of CSV files do; None if it is other text.

    Raises:
        MessageError: If they are there in another notation, such as that of Python.
    """
    inner = text.lstrip().removeprefix("[").lstrip()
    keys = next((pair for pair in _KEYS if all(key in text for key in pair)), None)
    if keys is None or inner == text.lstrip():
        return None
    try:
        found = json.loads(text)
    except RecursionError:
        raise MessageError(TOO_DEEP) from None
    except ValueError:
        if inner.startswith(tuple(f"{{{quote}{key}{quote}" for key in keys for quote in "\"'")):
            raise MessageError(
                "it seems to be chat messages that were written as text, and is not JSON; it would be one message. "
                "Save the rows as JSONL or Parquet, or the column as JSON"
            ) from None
        return None
    if not (isinstance(found, list) and all(isinstance(one, dict) and keys[0] in one for one in found)):
        return None
    if is_deep(found):
        raise MessageError(TOO_DEEP)
    return found


def checked_message(number: int, message: object) -> Message:
    """One message in the form that templates take.

    Raises:
        MessageError: If it is none, with its number, from 0.
    """
    if not isinstance(message, Mapping):
        raise MessageError(f"message {number} is {message!r:.80}, of type {type(message).__name__}; expected an object")
    checked = {
        str(key): part for key, part in message.items() if part is not None and (key, part) != ("tool_calls", [])
    }
    role, content, calls = (checked.get(key) for key in ("role", "content", "tool_calls"))
    if not isinstance(role, str):
        hint = " (of ShareGPT: from is role, and value is content)" if "from" in checked else ""
        raise MessageError(f"message {number} has no role: expected role and content, it has {sorted(checked)}{hint}")
    if calls is not None:
        checked["tool_calls"] = _checked_calls(f"message {number} ({role})", calls)
    if content is None and not calls:
        raise MessageError(f"message {number} ({role}) has no content and no tool_calls; it has {sorted(checked)}")
    checked["content"] = _text(f"message {number} ({role})", content)
    for key, part in checked.items():
        try:
            text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
        except TypeError as error:
            raise MessageError(
                f"message {number} ({role}) has the key {key!r} of type {type(part).__name__}, which no chat template "
                f"takes ({error}). Leave it out, or make it text"
            ) from None
        if not is_unicode(text):
            raise MessageError(
                f"message {number} ({role!a}) has half of a surrogate pair in {key}, which no tokenizer accepts"
            )
    return checked


def with_system(messages: Sequence[Message], text: str | None) -> list[Message]:
    """The messages, with a system message before them if they have none."""
    if text is None or messages[0]["role"] in _SYSTEM_ROLES:
        return list(messages)
    return [{"role": "system", "content": text}, *messages]


def is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_deep(value: Any) -> bool:
    """Whether lists and objects are in each other on more than `MAX_DEPTH` levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        within = []
        for one in level:
            within += [
                part for part in (one.values() if isinstance(one, dict) else one) if isinstance(part, (dict, list))
            ]
        if not within:
            return False
        level = within
    return True


def _text(where: str, content: object) -> str:
    """The content of a message as text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessageError(
            f"{where} has content of type {type(content).__name__}; expected text, or a list of text parts"
        )
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise MessageError(f"{where} has a part of type {kind!r} in its content; only parts of text are supported")
    return "".join(part["text"] for part in content)


def _checked_calls(where: str, calls: object) -> list[Any]:
    """The calls of a message, each with its arguments as an object.

    Raises:
        MessageError: If they are no list of calls.
    """
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise MessageError(f"{where} has the tool_calls {calls!r:.80}; expected a list of objects")
    checked: list[Any] = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
            checked.append(dict(call))
            continue
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise MessageError(
                f"{where} calls {function.get('name')!r} with arguments that are not JSON ({error})"
            ) from None
        if isinstance(arguments, dict | list) and is_deep(arguments):
            raise MessageError(f"{where} calls {function.get('name')!r} with arguments that cannot be used: {TOO_DEEP}")
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked
