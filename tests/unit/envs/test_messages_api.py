"""Anthropic's Messages, by its official client: whole and streamed answers say the same, and what is sent back
continues the recorded history."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from openai import AsyncOpenAI

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.config import EndpointConfig, EnvConfig, Ignorable, ReasoningConfig
from penstock.envs.endpoint.messages_api import SIGNATURE, parse_messages
from penstock.envs.endpoint.requests import Call, Caller
from penstock.envs.endpoint.scripted import play_program
from penstock.envs.environment import EndpointAccess
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.rollout.tokenization.tokenizers import TokenCodec
from tests.agents import CODEC, ReplyingEngine, check_tokens, run_agent
from tests.chat_tokenizers import chat_tokenizer
from tests.protocols import StuckEngine, anthropic_client, anthropic_client_of, post, questions, requests_of

TOOL: Any = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": %d}}</tool_call>'
THINKING = TokenCodec(chat_tokenizer("chatml"), reasoning=ReasoningConfig())
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
ASKED: Any = {"model": "policy", "max_tokens": 400, "messages": [{"role": "user", "content": "?"}]}

ANSWERS: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "text": ("né ✓ one two", {}, ["text né ✓ one two"], "end_turn"),
    "nothing": ("", {}, [], "end_turn"),
    "a cut text": ("one two three", {"max_tokens": 5}, ["text one t"], "max_tokens"),
    "a call": (
        f"\n One moment. \n{CALL % 1}",
        {"tools": [TOOL]},
        ["text \n One moment.", 'add {"a": 1, "b": 2}'],
        "tool_use",
    ),
    "several calls": (
        f"{CALL % 1}\n{CALL % 2}{CALL % 3}",
        {"tools": [TOOL]},
        [f'add {{"a": {a}, "b": 2}}' for a in (1, 2, 3)],
        "tool_use",
    ),
    "a malformed call": (
        "so <tool_call>{no</tool_call>",
        {"tools": [TOOL]},
        ["text so <tool_call>{no</tool_call>"],
        "end_turn",
    ),
    "a cut call": (f"so {CALL % 1}", {"tools": [TOOL], "max_tokens": 14}, ["text so <tool_call>"], "max_tokens"),
    "a stop text": ("EN 1 EEND and more", {"stop_sequences": ["zzz", "END"]}, ["text EN 1 E"], "stop_sequence"),
    "no stop text": ("EN 1 E", {"stop_sequences": ["END"]}, ["text EN 1 E"], "end_turn"),
    "reasoning": (
        "<think>6 times 7\n</think>\n\nIt is 42.",
        {},
        ["thinking 6 times 7\n", "text It is 42."],
        "end_turn",
    ),
    "reasoning and a call": (
        f"<think>6 times 7</think>One moment. {CALL % 1}",
        {"tools": [TOOL]},
        ["thinking 6 times 7", "text One moment.", 'add {"a": 1, "b": 2}'],
        "tool_use",
    ),
    "cut reasoning": ("<think>6 times 7</think>42", {"max_tokens": 14}, ["thinking 6 times"], "max_tokens"),
}  # fmt: skip


def described(message: Any) -> list[str]:
    """The blocks of a message, without their ids."""
    return [
        f"{block.name} {json.dumps(block.input)}"
        if block.type == "tool_use"
        else f"{block.type} {getattr(block, block.type)}"
        for block in message.content
    ]


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_the_same_whole_and_streamed(name: str) -> None:
    text, options, blocks, reason = ANSWERS[name]
    codec = THINKING if "reasoning" in name else CODEC
    async with anthropic_client(ReplyingEngine(lambda context: text, codec), codec=codec) as client:
        whole = await client.messages.create(**{**ASKED, **options})
        async with client.messages.stream(**{**ASKED, **options}) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        events = [event async for event in await client.messages.create(**{**ASKED, **options}, stream=True)]
    Message.model_validate(whole.to_dict())
    for event in events:
        type(event).model_validate(event.to_dict())
    assert described(whole) == described(streamed) == blocks
    assert whole.stop_reason == streamed.stop_reason == reason
    assert whole.stop_sequence == streamed.stop_sequence == ("END" if reason == "stop_sequence" else None)
    assert whole.usage == streamed.usage
    assert whole.usage.input_tokens > 10
    if reason == "max_tokens":
        assert whole.usage.output_tokens == options["max_tokens"]
    elif reason != "stop_sequence":
        assert whole.usage.output_tokens == len(text.encode()) + 1
    signatures = [
        block.signature for message in (whole, streamed) for block in message.content if block.type == "thinking"
    ]
    assert set(signatures) <= {SIGNATURE}

    # Each block begins, grows and ends before the next one.
    assert events[0].type == "message_start"
    assert [event.type for event in events][-2:] == ["message_delta", "message_stop"]
    order = [(event.type, event.index) for event in events if event.type.startswith("content_block")]
    distinct = list(dict.fromkeys(order))
    assert distinct == [
        (kind, index)
        for index in range(len(blocks))
        for kind in ("content_block_start", "content_block_delta", "content_block_stop")
    ]
    if name == "text":
        assert kinds.count("text") > 5, "it is streamed as it is sampled"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("keeps", ["everything", "no thinking", "redacted thinking"])
async def test_what_is_sent_back_continues_the_recorded_history(keeps: str, is_stream: bool) -> None:
    """Three turns with tools and reasoning: none is refused, so each history equals what was recorded."""

    def reply(context: str) -> str:
        assert context.count("Be brief.") == 1
        results = context.count("<tool_response>")
        said = {0: f"{CALL % 1}{CALL % 2}", 2: CALL % 3, 3: "It is 42."}[results]
        return f"<think>after {results}\n</think>\nWell. {said}"

    async def program(client: AsyncOpenAI) -> None:
        access = EndpointAccess(str(client.base_url).rstrip("/"), client.api_key, "policy")
        messages: list[Any] = [{"role": "user", "content": "17+25?"}]
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        asked: Any = {**ASKED, "system": system, "tools": [TOOL], "messages": messages}
        async with anthropic_client_of(access) as own:
            while True:
                if is_stream:
                    async with own.messages.stream(**asked) as stream:
                        answer: Any = await stream.get_final_message()
                else:
                    answer = await own.messages.create(**asked)
                content = [block for block in answer.content if keeps == "everything" or block.type != "thinking"]
                if keeps == "redacted thinking":
                    content.insert(0, {"type": "redacted_thinking", "data": "x"})
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    assert answer.content[-1].text == "Well. It is 42."
                    return
                results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]

    engine = ReplyingEngine(reply, THINKING)
    trajectory = await run_agent(program, engine, codec=THINKING)
    check_tokens(engine, trajectory)
    assert trajectory.episode is not None
    assert len(trajectory.episode.turns) == 3
    assert "refused" not in trajectory.episode.counts


async def test_the_requests_of_claude_code_are_a_title_and_a_conversation() -> None:
    policy, requests = requests_of("claude-code")
    title, *turns = requests
    assert title["body"]["output_config"]["format"]["type"] == "json_schema"
    async with questions(ReplyingEngine(policy("0"))) as (access, _):
        status, body, _ = await post(access, "/messages?beta=true", title["body"])
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert "output_config.format" in body["error"]["message"]
        assert "env.endpoint.ignore=[response_format]" in body["error"]["message"]
    async with questions(ReplyingEngine(policy("0")), ignore=("response_format",)) as (access, _):
        status, events, headers = await post(access, "/messages?beta=true", title["body"])
        assert (status, headers["x-penstock-ignored"]) == (200, "output_config.format, output_config.effort")
        assert events.endswith('event: message_stop\ndata: {"type": "message_stop"}\n\n')

    async def program(client: AsyncOpenAI) -> None:
        access = EndpointAccess(str(client.base_url).rstrip("/"), client.api_key, "policy")
        for turn in turns:
            headers = {"Authorization": "", "x-api-key": access.api_key}
            status, events, headers = await post(access, "/messages?beta=true", turn["body"], headers=headers)
            assert status == 200, events
            assert headers["x-penstock-ignored"] == "thinking, context_management, output_config.effort"

    engine = ReplyingEngine(policy("1"))
    trajectory = await run_agent(program, engine, max_tokens=9000)
    check_tokens(engine, trajectory)
    assert trajectory.episode is not None
    assert (len(trajectory.episode.turns), trajectory.episode.turns[-1].response) == (3, "All done.")
    assert "refused" not in trajectory.episode.counts


def test_blocks_become_the_messages_of_a_chat() -> None:
    body = {
        "model": "policy",
        "max_tokens": 7,
        "system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": None}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]},
            {"role": "system", "content": "be quick"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm\n", "signature": "s"},
                {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "x", "name": "add", "input": {"b": 2, "a": 1}},
                {"type": "tool_use", "id": "y", "name": "add", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "3"}]},
                {"type": "tool_result", "tool_use_id": "y"},
                {"type": "text", "text": "Go on."},
            ]},
            {"role": "assistant", "content": []},
            {"role": "user", "content": "And?"},
        ],
        "stop_sequences": ["END"],
    }  # fmt: skip
    request = parse_messages(body, Caller()).request
    assert request.messages == (
        ("system", "one\ntwo", (), ""),
        ("user", " a \nb", (), ""),
        ("system", "be quick", (), ""),
        ("assistant", "So.", (("add", '{"a": 1, "b": 2}'), ("add", "{}")), "hm"),
        ("tool", "3", (), ""),
        ("tool", "", (), ""),
        ("user", "Go on.", (), ""),
        ("assistant", "", (), ""),
        ("user", "And?", (), ""),
    )
    assert (request.max_tokens, request.stop) == (7, ("END",))


REFUSED: dict[str, tuple[dict[str, Any], str, type[anthropic.APIStatusError]]] = {
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, IMAGE]}]},
        r"messages\[0\]\.content\[1\]\.type: Blocks of type 'image'",
        anthropic.BadRequestError,
    ),
    "an image in a result": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}]},
        r"'messages\[0\]\.content\[0\]\.content'.*image",
        anthropic.BadRequestError,
    ),
    "a tool use of the user": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "a", "input": {}}]}]},
        "'tool_use' are not supported in messages of the role 'user'",
        anthropic.BadRequestError,
    ),
    "a prefilled answer": (
        {"messages": [*ASKED["messages"], {"role": "assistant", "content": "I"}]},
        "nothing to answer",
        anthropic.BadRequestError,
    ),
    "no messages": ({"messages": []}, "no message", anthropic.BadRequestError),
    "no tokens": ({"max_tokens": 0}, "max_tokens", anthropic.BadRequestError),
    "no schema": ({"tools": [{"name": "add"}]}, r"tools\[0\]\.input_schema", anthropic.BadRequestError),
    "a server": ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", anthropic.BadRequestError),
    "unknown": ({"min_p": 0.1}, "Unknown parameter: 'min_p'", anthropic.BadRequestError),
    "another model": ({"model": "claude-0"}, "'claude-0' does not exist", anthropic.NotFoundError),
    "too long": ({"system": "x" * 200_000}, "maximum context", anthropic.BadRequestError),
    "too large": ({"system": "x" * (5 << 20)}, "too large", anthropic.ContentTooLargeError),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    change, message, kind = REFUSED[name]
    async with anthropic_client(ReplyingEngine(lambda context: "ok")) as client:
        for is_stream in (False, True):
            with pytest.raises(kind, match=message) as refused:
                await client.messages.create(**ASKED, stream=is_stream, extra_body=change)
            assert refused.value.type == ("not_found_error" if name == "another model" else "invalid_request_error")
            assert refused.value.body["type"] == "error"  # type: ignore[index]


IGNORABLE: dict[str, tuple[dict[str, Any], Ignorable]] = {
    "output_config.format": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        "response_format",
    ),
    "tool_choice": ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "tool_choice"),
    "tool_choice.disable_parallel_tool_use": (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [TOOL]},
        "parallel_tool_calls",
    ),
}


@pytest.mark.parametrize("param", IGNORABLE)
async def test_what_the_policy_does_not_follow_is_refused_unless_the_user_lists_it(param: str) -> None:
    asked, key = IGNORABLE[param]
    async with anthropic_client(ReplyingEngine(lambda context: "ok")) as client:
        with pytest.raises(anthropic.BadRequestError, match=rf"env\.endpoint\.ignore=\[{key}\]") as refused:
            await client.messages.create(**ASKED, **asked)
        assert refused.value.error_code == "unsupported_value"
    async with anthropic_client(ReplyingEngine(lambda context: "ok"), ignore=(key,)) as client:
        answer = await client.messages.with_raw_response.create(**ASKED, **asked)
        assert answer.headers["x-penstock-ignored"] == param


async def test_what_has_no_effect_is_named_in_a_header() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    async with anthropic_client(ReplyingEngine(lambda context: "ok")) as client:
        answer = await client.beta.messages.with_raw_response.create(
            **ASKED,
            tools=[{**TOOL, "strict": True, "cache_control": {"type": "ephemeral"}}, search],
            tool_choice={"type": "auto"},
            thinking={"type": "adaptive"},
            metadata={"user_id": "me"},
            extra_body={"temperature": 0.5, "top_k": 3},
        )
    assert (
        answer.headers["x-penstock-ignored"] == "top_k, thinking, temperature, tools.strict, tools.web_search_20250305"
    )


async def test_a_stream_whose_session_ends_closes_with_an_error_event() -> None:
    engine, kinds = StuckEngine(lambda context: "one two three"), []
    async with questions(engine) as (access, answering), anthropic_client_of(access) as client:
        with pytest.raises(anthropic.APIStatusError, match="session ended") as failed:  # noqa: PT012
            async for event in await client.messages.create(**ASKED, stream=True):
                kinds.append(event.type)
                if event.type == "content_block_delta":
                    await answering.close()
    assert failed.value.type == "api_error"
    assert kinds[0] == "message_start"
    assert "message_stop" not in kinds


async def test_errors_of_keys_and_paths_have_the_form_of_the_protocol() -> None:
    async with questions(ReplyingEngine(lambda context: "ok")) as (access, _), anthropic_client_of(access) as client:
        assert (await client.with_options(api_key=access.api_key).messages.create(**ASKED)).content
        for stranger in (client.with_options(api_key="x"), client.with_options(api_key=access.api_key[:-1])):
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await stranger.messages.create(**ASKED)
            assert (unknown.value.type, unknown.value.error_code) == ("authentication_error", "invalid_api_key")
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.count_tokens(model="policy", messages=ASKED["messages"])
        assert (missing.value.type, missing.value.error_code) == ("not_found_error", "unknown_url")


PROGRAM = """
import anthropic
messages = [{"role": "user", "content": "?"}]
message = anthropic.Anthropic().messages.create(model="policy", max_tokens=9, messages=messages)
print(float(message.content[0].text == "yes"))
"""


async def test_a_program_finds_the_address_in_the_variables_that_the_client_reads(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    args = {"tasks": "arithmetic", "agent": [sys.executable, str(tmp_path / "program.py")]}
    config = EnvConfig(factory="agent", args=args)

    async def say(content: object) -> str:
        return "yes"

    task = Task(TaskId("t/0"), "?", {}, "")
    host = EpisodeHost(config, 0)
    try:
        async with host.open(task) as played:
            await played.reset()
            assert (await play_program(config, played, "t/0", say))["reward"] == 1.0
    finally:
        await host.close()


def test_an_unknown_name_in_the_list_is_a_configuration_error() -> None:
    with pytest.raises(ValueError, match="'response_format', 'tool_choice' or 'parallel_tool_calls'"):
        EndpointConfig.model_validate({"ignore": ["temperature"]})


def test_numbers_of_a_call_are_compared_as_javascript_sends_them_back() -> None:
    sampled = Call.of("f", '{"a": 1.0, "b": [2.0, 2.5], "c": 1e300, "d": "1.0"}')
    assert sampled == Call.of("f", {"a": 1, "b": [2, 2.5], "c": 1e300, "d": "1.0"})
    assert sampled.arguments == '{"a": 1, "b": [2, 2.5], "c": 1e+300, "d": "1.0"}'
