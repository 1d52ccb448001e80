"""Reads a sampled turn as reasoning, content and tool calls: the port, and the form of Hermes and Qwen.

Model families write calls in some thirty forms. A parser reads a turn once, as a whole, when it has ended
(`AnswerParser.parse`). `HermesParser` reads one form in this process. vLLM's parsers read all others; they are asked
where vLLM is, in an engine's process (actors/engine/answer_parser.py, rollout/engines/vllm/answer_parser.py).

While a turn is sampled, no parser is asked: `ContentReader` gives the text up to the first sign of a call, and holds
back everything from there on:

    The sum is next.\\n\\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>
    └── streamed ───┘└──────────── held back until `parse` has said what it is ────────────┘

vLLM's parsers read streams too, but in vLLM 0.32 most of them then give other calls or other content than for the same
text as a whole, and that depends on where the text is cut; one gives no calls at all. So their whole form decides, and
a sign is any text with which one of their forms can begin. The price is that text after the first sign arrives at the
end of the turn, also if it was no call.

Invariant: what a `ContentReader` gave and then `rest` are together the content of `parse`, wherever the text was cut.
It holds for every parser, since `content_after` begins the content with the text before the first sign.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from penstock.envs.endpoint.requests import Call
from penstock.envs.reasoning import num_begun
from penstock.envs.tools.functions import CALL_OPENING, parse_calls

HERMES = "hermes"
ANY_TEXT = ("",)
"""The signs of a parser that reads reasoning: the beginning of a turn may be reasoning, so nothing is streamed."""


class ParserNames(NamedTuple):
    """vLLM's names of parsers."""

    tool_calls: str
    """The parser of calls."""
    reasoning: str | None = None
    """The parser of reasoning; None: turns are read without their reasoning."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """What a parser reads."""

    text: str
    """The turn without the token that ended it, cut before a stop text; with all other special tokens if the parser
    `keeps_special_tokens`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of the request, in the form of OpenAI."""
    token_ids: Sequence[int] = ()
    """Sampled tokens, without the one that ended the turn."""


class ParsedAnswer(NamedTuple):
    """What a program receives."""

    content: str
    """Text without reasoning and calls. If there are no calls, because there are none or because one is malformed, it
    is all text but the reasoning."""
    calls: tuple[Call, ...] = ()
    """In their order; their arguments are JSON objects."""
    reasoning: str | None = None
    """None if the parser reads none."""


class AnswerParser(Protocol):
    """Reads turns of one family."""

    signs: tuple[str, ...]
    """Texts of which one precedes or begins every call."""
    keeps_special_tokens: bool
    """Whether the marks of calls are special tokens, which texts otherwise leave out."""
    reads_reasoning: bool
    """Whether turns of requests without tools are parsed too."""

    async def parse(self, turn: SampledTurn) -> ParsedAnswer:
        """Read a whole turn.

        Raises:
            EngineLostError: If it is read by engines, and none answers.
        """
        ...


class HermesParser:
    """Reads `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. One malformed call makes all of it text."""

    signs: tuple[str, ...] = (CALL_OPENING,)
    keeps_special_tokens = False
    reads_reasoning = False

    async def parse(self, turn: SampledTurn) -> ParsedAnswer:
        """See `AnswerParser`. Waits for nothing."""
        calls = parse_calls(turn.text) if turn.tools else []
        if not calls or any(call.problem for call in calls):
            return ParsedAnswer(turn.text)
        called = tuple(Call.of(call.name, call.arguments) for call in calls)
        return ParsedAnswer(content_after(turn.text, "", self.signs), called)


class ContentReader:
    """Reads a turn while it is sampled; gives the text that is content whatever follows.

    Space is held back until other text follows, since space before a call is left out.

    Args:
        signs: `AnswerParser.signs`; none for a request without tools, whose text is all content.

    Attributes:
        given: Content so far.
    """

    def __init__(self, signs: Sequence[str]) -> None:
        self.given = ""
        self._signs = signs
        self._held = ""
        self._has_sign = False

    def read(self, text: str) -> str:
        """Read a piece; returns the new content."""
        if self._has_sign:
            return ""
        self._held += text
        begins = [at for sign in self._signs if (at := self._held.find(sign)) >= 0]
        self._has_sign = bool(begins)
        end = min(begins, default=len(self._held) - num_begun(self._held, self._signs))
        ready = self._held[:end].rstrip()
        self._held = self._held[len(ready) :]
        self.given += ready
        return ready

    def rest(self, parsed: ParsedAnswer) -> str:
        """The rest of the content, at the end of the turn."""
        return parsed.content.removeprefix(self.given)


def content_after(text: str, read: str, signs: Sequence[str]) -> str:
    """The content of a turn with calls: the text before the first sign, then what else the parser read as content.

    Args:
        text: The turn.
        read: The content, as a parser of vLLM gives it: some leave out what precedes a call.
        signs: Signs of a call.
    """
    reader, read = ContentReader(signs), read.strip()
    before = reader.read(text)
    return before + read.removeprefix(before.strip()) if read.startswith(before.strip()) else before


def checked_call(name: str, arguments: str) -> Call | None:
    """A call whose arguments are JSON text with sorted keys; None if it has no name, or they are no JSON object."""
    try:
        values = json.loads(arguments)
        # JSON may escape half of a surrogate pair (\\ud83d), which no tokenizer and no file takes.
        json.dumps([name, values], ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return Call.of(name, values) if name and isinstance(values, dict) else None
