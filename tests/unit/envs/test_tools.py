"""A wrong tool call of the model is reported to it and counted; it never ends the episode."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import Any

import pytest

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.environment import Action, Done, Observation
from penstock.envs.tools.functions import Tool, Toolbox, ToolCall, ToolResult, parse_calls, with_tools
from penstock.envs.tools.tool_environment import ToolEnvironment
from penstock.envs.workers.episode_child import is_episode_reply, to_episode_reply


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def search(words: list[str]) -> dict[str, int]:
    return {word: len(word) for word in words}


def fails() -> None:
    raise KeyError("shelf")


def sleeps() -> None:
    time.sleep(0.5)


def keyed() -> dict[tuple[int, int], str]:
    return {(0, 1): "x"}


def leaves() -> None:
    sys.exit(1)


async def leaves_later() -> None:
    await asyncio.sleep(0)
    sys.exit(1)


def circular() -> list[object]:
    items: list[object] = []
    items.append(items)
    return items


class NoMessageError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises_without_message() -> None:
    raise NoMessageError


async def waits_for_a_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(1))
    task.cancel()
    await task


async def rests() -> None:
    await asyncio.sleep(30)


LONG = "x" * 5000


def lengthy() -> str:
    return LONG


HOSTILE = [keyed, leaves, leaves_later, circular, raises_without_message, waits_for_a_cancelled_task]
BOX = Toolbox([add, search, fails, sleeps], timeout_s=0.2)


def test_the_schema_comes_from_the_signature() -> None:
    assert BOX.schemas()[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
            },
        },
    }
    assert BOX.schemas()[1]["function"]["parameters"]["properties"]["words"] == {
        "type": "array",
        "items": {"type": "string"},
    }


@pytest.mark.parametrize(
    ("text", "outcome", "said"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "ok", "5"),
        ('I think\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call> so', "ok", "3"),
        ('<tool_call>{"name": "add", "arguments": {"a": 2}}', "ok", "3"),
        ('<tool_call>{"name": "search", "arguments": {"words": ["né"]}}</tool_call>', "ok", '{"né": 2}'),
        ('<tool_call>{"name": "ad", "arguments": {}}</tool_call>', "unknown_tool", "Did you mean 'add'"),
        ("<tool_call>add(1, 2)</tool_call>", "bad_json", "not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "bad_json", "no name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "bad_json", "arguments is a list"),
        ('<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>', "bad_arguments", "a: Input should be"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "c": 2}}</tool_call>', "bad_arguments", "c: Extra inputs"),
        ('<tool_call>{"name": "fails"}</tool_call>', "error", "KeyError: 'shelf'"),
        ('<tool_call>{"name": "sleeps"}</tool_call>', "timeout", "took longer than 0.2 s"),
        ("<tool_call>" + "[" * 5000, "bad_json", "not JSON"),
        *(
            (f"<tool_call>{call}</tool_call>", "bad_json", r"error: \ud83d is half of a surrogate pair")
            for call in (
                r'{"name": "search", "arguments": {"words": ["\ud83d"]}}',
                r'{"name": "add", "arguments": {"\ud83d": 1}}',
                r'{"name": "\ud83d", "arguments": {}}',
            )
        ),
    ],
)
async def test_every_call_has_an_outcome(text: str, outcome: str, said: str) -> None:
    (call,) = parse_calls(text)
    result = await BOX.run(call)
    assert result.outcome == outcome
    assert said in result.text


async def test_what_a_tool_gives_can_always_be_encoded() -> None:
    def listing() -> str:
        """List files."""
        return b"caf\xe9".decode(errors="surrogateescape")

    def refuses() -> None:
        """Refuse."""
        raise ValueError("\udce9")

    box = Toolbox([listing, refuses])
    assert await box.run(ToolCall("listing", {})) == ToolResult("ok", "caf?")
    assert await box.run(ToolCall("refuses", {})) == ToolResult("error", "error: ValueError: ?")


async def test_a_long_result_is_cut_and_the_model_is_told_how_much_is_missing() -> None:
    box = Toolbox([lengthy])
    assert await box.run(ToolCall("lengthy", {})) == ToolResult("ok", "x" * 4000 + "… (1000 more characters)", True)
    assert await Toolbox([lengthy], max_result_characters=5000).run(ToolCall("lengthy", {})) == ToolResult("ok", LONG)

    class Reading(Sums):
        tools = (lengthy,)
        max_result_characters = 10

    environment = Reading()
    environment.reset(Task(TaskId("t"), [{"role": "user", "content": "?"}], {}))
    said = await environment.step(Action('<tool_call>{"name": "lengthy"}</tool_call>'))
    assert isinstance(said, Observation)
    assert said.text == "xxxxxxxxxx… (4990 more characters)"
    assert said.counts == {"tool_calls": 1.0, "tool_errors": 0.0, "tool_results_cut": 1.0}


async def test_a_plain_function_around_an_asynchronous_one_is_awaited() -> None:
    def wrapped(words: list[str]) -> object:
        return search(words)

    def rests_later() -> object:
        return rests()

    box = Toolbox([wrapped, rests_later], timeout_s=0.2)
    assert await box.run(ToolCall("wrapped", {"words": ["a"]})) == ToolResult("ok", '{"a": 1}')
    assert (await box.run(ToolCall("rests_later", {}))).outcome == "timeout"


@pytest.mark.parametrize("tool", HOSTILE)
async def test_whatever_a_tool_does_is_an_outcome(tool: Tool) -> None:
    result = await Toolbox([tool]).run(ToolCall(tool.__name__, {}))
    assert result.outcome == "error"
    assert re.match(r"error: (TypeError|SystemExit|ValueError|NoMessageError|CancelledError)", result.text)


async def test_a_cancelled_episode_does_not_go_on_with_its_tool() -> None:
    episode = asyncio.create_task(Toolbox([rests], timeout_s=60).run(ToolCall("rests", {})))
    await asyncio.sleep(0.05)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode


def test_text_without_a_call_has_none_and_several_keep_their_order() -> None:
    assert parse_calls("the tool_call is add(1)") == []
    calls = parse_calls('<tool_call>{"name":"a"}</tool_call><tool_call>{"name":"b"}</tool_call>')
    assert calls == [ToolCall("a", {}), ToolCall("b", {})]


def test_a_tool_that_cannot_be_described_is_refused() -> None:
    def untyped(a) -> None: ...  # type: ignore[no-untyped-def]

    def many(*numbers: int) -> None: ...

    with pytest.raises(TypeError, match=r"tool untyped\(a\).*'a' has no type hint"):
        Toolbox([untyped])
    with pytest.raises(TypeError, match="cannot be named in a call"):
        Toolbox([many])
    with pytest.raises(TypeError, match="two tools are named 'add'"):
        Toolbox([add, add])


class Sums(ToolEnvironment):
    tools = (add, fails)
    max_calls_per_turn = 2

    def score(self, task: Task, answer: str) -> dict[str, float]:
        return {"right": float(answer == task.fields["answer"])}


def test_tools_are_given_with_the_prompt_and_can_be_described_in_the_system_message() -> None:
    user = {"role": "user", "content": "2+3?"}
    begun = Sums().reset(Task(TaskId("t"), [user]))
    assert begun.messages == [user]
    assert [tool["function"]["name"] for tool in begun.tools] == ["add", "fails"]
    said = with_tools([user], begun.tools)
    assert [message["role"] for message in said] == ["system", "user"]
    assert '"name": "add"' in said[0]["content"]
    said = with_tools([{"role": "system", "content": "Be brief."}, user], begun.tools)
    assert said[0]["content"].startswith("Be brief.\n\nYou may call")
    assert said[1:] == [user]


@pytest.mark.parametrize("tools", [["add"], [add], "add"])
def test_tools_that_are_no_objects_are_an_error_of_the_environment(tools: Any) -> None:
    assert "expected objects" in to_episode_reply(Observation("?", tools=tools), "reset")["error"]
    assert not is_episode_reply({"content": "?", "role": "user", "tools": ["add"]})


async def test_results_are_tool_messages_errors_are_counted_and_the_answer_is_scored() -> None:
    environment = Sums()
    environment.reset(Task(TaskId("t"), [{"role": "user", "content": "2+3?"}], {"answer": "5"}))
    calls = ['{"name": "add", "arguments": {"a": 2, "b": 3}}', '{"name": "fails"}', '{"name": "add"}']
    said = await environment.step(Action("".join(f"<tool_call>{call}</tool_call>" for call in calls)))
    assert isinstance(said, Observation)
    assert [message["content"] for message in said.messages] == [
        "5",
        "error: KeyError: 'shelf'",
        "error: 1 more calls were ignored; 2 fit",
    ]
    assert said.counts == {"tool_calls": 3.0, "tool_errors": 1.0, "tool_error": 1.0}
    assert await environment.step(Action("5")) == Done({"right": 1.0})
    await asyncio.sleep(0)
