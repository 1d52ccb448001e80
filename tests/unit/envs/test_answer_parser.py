"""Turns are read whole; what is streamed of them is the beginning of the same content, wherever the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.envs.endpoint.answer_parser import (
    ContentReader,
    HermesParser,
    ParsedAnswer,
    SampledTurn,
    checked_call,
    content_after,
)
from penstock.envs.endpoint.requests import Call
from tests.tiers import examples

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ADD = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
ADDED = Call("add", '{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ADD, ParsedAnswer("", (ADDED,))),
        (f"The sum is next.\n\n{ADD}", ParsedAnswer("The sum is next.", (ADDED,))),
        (f"{ADD}\n{ADD}\nI wait.", ParsedAnswer("", (ADDED, ADDED))),
        (ADD.removesuffix("</tool_call>"), ParsedAnswer("", (ADDED,))),
        (" It is 3.\n", ParsedAnswer(" It is 3.\n")),
        (f'{ADD}\n<tool_call>{{"name": "add"', ParsedAnswer(f'{ADD}\n<tool_call>{{"name": "add"')),
        ("", ParsedAnswer("")),
    ],
)
async def test_the_form_of_hermes_is_read_and_one_malformed_call_makes_all_of_it_text(
    text: str, expected: ParsedAnswer
) -> None:
    assert await HermesParser().parse(SampledTurn(text, TOOLS)) == expected


async def test_without_tools_a_call_is_text() -> None:
    assert await HermesParser().parse(SampledTurn(ADD)) == ParsedAnswer(ADD)


PARTS = st.sampled_from(
    ["<", "<tool", "<tool_call>", "</tool_call>", "func", "functools", " ", "\n", "a", "é", "[", "{"]
)


@settings(max_examples=examples(500), deadline=None)
@given(
    pieces=st.lists(st.lists(PARTS, max_size=4).map("".join), max_size=8),
    signs=st.sampled_from([(), ("<tool_call>",), ("<", "[", "functools"), ("",)]),
    is_call=st.booleans(),
    read=st.sampled_from(["", "a", "é a", "other"]),
)
def test_the_pieces_are_together_the_content_of_the_whole(
    pieces: list[str], signs: tuple[str, ...], is_call: bool, read: str
) -> None:
    text = "".join(pieces)
    parsed = ParsedAnswer(content_after(text, read, signs), (ADDED,)) if is_call else ParsedAnswer(text)
    reader = ContentReader(signs)
    given_early = [reader.read(piece) for piece in pieces]
    assert "".join(given_early) == reader.given
    assert reader.given + reader.rest(parsed) == parsed.content
    whole = ContentReader(signs)
    whole.read(text)
    assert whole.given == reader.given, "it depends on the text alone, not on where it was cut"


def test_text_is_streamed_until_something_may_be_a_call_and_space_only_before_further_text() -> None:
    reader = ContentReader(("<tool_call>",))
    assert [reader.read(piece) for piece in ("I ", "add <to", "ols>", ".\n", "<tool_call>", "x")] == [
        "I",
        " add",
        " <tools>",
        ".",
        "",
        "",
    ]


def test_content_that_a_parser_leaves_out_or_strips_begins_with_what_was_streamed() -> None:
    signs = ("<",)
    assert content_after("\n I add. <call>1</call>", "", signs) == "\n I add."
    assert content_after("\n I add. <call>1</call> Now.", "I add. Now.", signs) == "\n I add. Now."
    assert content_after("<call>1</call> Now.", " Now. ", signs) == "Now."


@pytest.mark.parametrize("arguments", ["", "[1]", "1", '{"a": ', '{"a": "\\ud83d"}', "[" * 100_000])
def test_arguments_that_are_no_object_of_text_are_no_call(arguments: str) -> None:
    assert checked_call("add", arguments) is None


def test_a_call_has_sorted_arguments_and_a_name() -> None:
    assert checked_call("add", '{"b":2,"a":1}') == ADDED
    assert json.loads(checked_call("f", "{}").arguments) == {}  # type: ignore[union-attr]
    assert checked_call("", "{}") is None
