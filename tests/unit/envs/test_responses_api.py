"""OpenAI's Responses, by its official client and its agents: whole and streamed answers say the same, and what is sent
back continues the recorded history."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai
import pytest
from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from openai.types.responses import Response

from penstock.envs.config import Ignorable, ReasoningConfig
from penstock.envs.endpoint.requests import MAX_STORED, ApiError, Caller, ChatMessage, StoredHistories
from penstock.envs.endpoint.responses_api import parse_response
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.rollout.tokenization.tokenizers import TokenCodec
from tests.agents import CODEC, ReplyingEngine, check_tokens, client_of, run_agent, run_agents
from tests.chat_tokenizers import chat_tokenizer
from tests.protocols import StuckEngine, openai_client, post, questions, requests_of

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": %d}}</tool_call>'
THINKING = TokenCodec(chat_tokenizer("chatml"), reasoning=ReasoningConfig())
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}

ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("né ✓ one two", {}),
    "nothing": ("", {}),
    "a cut text": ("one two three", {"max_output_tokens": 5}),
    "a call": (f"\n One moment. \n{CALL % 1}", {"tools": [TOOL]}),
    "several calls": (f"{CALL % 1}\n{CALL % 2}{CALL % 3}", {"tools": [TOOL]}),
    "a malformed call": ("so <tool_call>{not json</tool_call> \n", {"tools": [TOOL]}),
    "a cut call": (f"so {CALL % 1}", {"tools": [TOOL], "max_output_tokens": 30}),
    "reasoning": ("<think>6 times 7\n</think>\n\nIt is 42.", {}),
    "reasoning and a call": (f"<think>6 times 7</think>One moment. {CALL % 1}", {"tools": [TOOL]}),
    "cut reasoning": ("<think>6 times 7</think>42", {"max_output_tokens": 14}),
    "only reasoning": ("<think>6 times 7</think>", {}),
}


def without_ids(items: Any) -> list[Any]:
    """Items of an answer, without what differs in each answer."""
    dumped = [item.to_dict(mode="json") for item in items]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in dumped]


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_the_same_whole_and_streamed(name: str) -> None:
    text, options = ANSWERS[name]
    codec = THINKING if "reasoning" in name else CODEC
    async with openai_client(ReplyingEngine(lambda context: text, codec), codec=codec) as client:
        whole = await client.responses.create(model="policy", input="?", **options)
        stream = await client.responses.create(model="policy", input="?", stream=True, **options)
        events = [event async for event in stream]
    Response.model_validate(whole.to_dict())
    for number, event in enumerate(events):
        type(event).model_validate(event.to_dict())
        assert event.sequence_number == number

    last = events[-1]
    assert last.type == ("response.incomplete" if "cut" in name else "response.completed")
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert without_ids(last.response.output) == without_ids(whole.output)
    assert (last.response.usage, last.response.status) == (whole.usage, whole.status)
    assert last.response.incomplete_details == whole.incomplete_details
    assert whole.usage is not None
    assert whole.usage.output_tokens == options.get("max_output_tokens", len(text.encode()) + 1)

    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] == [item.id for item in last.response.output]
    assert done == last.response.output
    said: Counter[int] = Counter()
    texts: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
            said[event.output_index] += 1
    for index, item in enumerate(last.response.output):
        full = item.arguments if item.type == "function_call" else item.content[0].text
        assert texts.get(index, "") == full
    if name == "text":
        assert said[0] > 5, "it is streamed as it is sampled"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("text", ["message completed né ✓ one two"]),
        ("nothing", ["message completed "]),
        ("a cut text", ["message incomplete one t"]),
        ("a call", ["message completed \n One moment.", 'add {"a": 1, "b": 2}']),
        ("several calls", ['add {"a": 1, "b": 2}', 'add {"a": 2, "b": 2}', 'add {"a": 3, "b": 2}']),
        ("a malformed call", ["message completed so <tool_call>{not json</tool_call> \n"]),
        ("reasoning", ["reasoning completed 6 times 7\n", "message completed It is 42."]),
        (
            "reasoning and a call",
            ["reasoning completed 6 times 7", "message completed One moment.", 'add {"a": 1, "b": 2}'],
        ),
        ("cut reasoning", ["reasoning completed 6 times", "message incomplete "]),
    ],
)
async def test_items_are_what_the_policy_said(name: str, expected: list[str]) -> None:
    text, options = ANSWERS[name]
    codec = THINKING if "reasoning" in name else CODEC
    async with openai_client(ReplyingEngine(lambda context: text, codec), codec=codec) as client:
        response = await client.responses.create(model="policy", input="?", **options)
    found = [
        f"{item.name} {item.arguments}"
        if item.type == "function_call"
        else f"{item.type} {item.status} {item.content[0].text}"
        for item in response.output
    ]
    assert found == expected


async def test_the_stream_of_the_client_gathers_the_same_response() -> None:
    text, options = ANSWERS["reasoning and a call"]
    engine = ReplyingEngine(lambda context: text, THINKING)
    async with (
        openai_client(engine, codec=THINKING) as client,
        client.responses.stream(model="policy", input="?", **options) as stream,
    ):
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "One moment."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("keeps", ["everything", "no reasoning", "previous_response_id"])
async def test_what_is_sent_back_continues_the_recorded_history(keeps: str, is_stream: bool) -> None:
    """Three turns with tools and reasoning: none is refused, so each history equals what was recorded."""

    def reply(context: str) -> str:
        assert context.count("Be brief.") == 1
        results = context.count("<tool_response>")
        said = {0: f"{CALL % 1}{CALL % 2}", 2: CALL % 3, 3: "It is 42."}[results]
        return f"<think>after {results}\n</think>\nWell. {said}"

    async def program(client: AsyncOpenAI) -> None:
        history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "17+25?"}]}]
        new, previous = history, None
        while True:
            kept = {"input": new, "previous_response_id": previous} if previous else {"input": history}
            stores = keeps == "previous_response_id"
            asked: Any = {"model": "policy", "instructions": "Be brief.", "tools": [TOOL], "store": stores, **kept}
            if is_stream:
                async with client.responses.stream(**asked) as stream:
                    response: Any = await stream.get_final_response()
            else:
                response = await client.responses.create(**asked)
            items = [item for item in response.output if keeps != "no reasoning" or item.type != "reasoning"]
            calls = [item for item in items if item.type == "function_call"]
            if not calls:
                assert response.output_text == "Well. It is 42."
                return
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
            history += [*items, *new]
            previous = response.id if stores else None

    engine = ReplyingEngine(reply, THINKING)
    trajectory = await run_agent(program, engine, codec=THINKING)
    check_tokens(engine, trajectory)
    assert trajectory.episode is not None
    assert len(trajectory.episode.turns) == 3
    assert "refused" not in trajectory.episode.counts


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_agent_of_the_agents_sdk_runs_with_its_default_protocol(is_stream: bool) -> None:
    calls: list[tuple[int, int]] = []

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return a + b

    async def program(client: AsyncOpenAI) -> EpisodeReply:
        agent = Agent(
            name="calculator", instructions="Use it.", model=OpenAIResponsesModel("policy", client), tools=[add]
        )
        config = RunConfig(tracing_disabled=True)
        if is_stream:
            streamed = Runner.run_streamed(agent, "17+25?", run_config=config)
            assert "raw_response_event" in {event.type async for event in streamed.stream_events()}
            said = streamed.final_output
        else:
            said = (await Runner.run(agent, "17+25?", run_config=config)).final_output
        return {"done": True, "reward": float(said == "It is 42.")}

    def reply(context: str) -> str:
        call = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'
        return "<think>ok</think>It is 42." if "<tool_response>" in context else f"<think>hm</think>Let me see. {call}"

    engine = ReplyingEngine(reply, THINKING)
    trajectory = await run_agent(program, engine, codec=THINKING, timeout_s=30.0)
    check_tokens(engine, trajectory)
    assert calls == [(17, 25)]
    assert trajectory.episode is not None
    assert (trajectory.episode.reward, len(trajectory.episode.turns)) == (1.0, 2)
    assert "refused" not in trajectory.episode.counts


async def test_the_requests_of_codex_are_one_conversation() -> None:
    policy, requests = requests_of("codex")
    left_out: list[str] = []

    async def program(client: AsyncOpenAI) -> None:
        for request in requests:
            create = client.responses.with_raw_response.create
            answer = await create(model="policy", input="", stream=True, extra_body=request["body"])
            left_out.append(answer.headers["x-penstock-ignored"])
            events = [event async for event in answer.parse()]
            assert events[-1].type == "response.completed"

    engine = ReplyingEngine(policy("0"))
    trajectory = await run_agent(program, engine, max_tokens=9000)
    check_tokens(engine, trajectory)
    assert trajectory.episode is not None
    assert (len(trajectory.episode.turns), trajectory.episode.turns[-1].response) == (3, "All done.")
    assert left_out == ["reasoning, tools.namespace, tools.web_search"] * 3
    assert "refused" not in trajectory.episode.counts


async def test_a_response_is_continued_by_its_id_only_in_its_own_session_and_if_it_is_stored() -> None:
    ids: list[str] = []

    async def stores(client: AsyncOpenAI) -> None:
        ids.append((await client.responses.create(model="policy", input="?")).id)
        assert (await client.responses.create(model="policy", input="on", previous_response_id=ids[0])).output_text

    async def does_not(client: AsyncOpenAI) -> None:
        own = await client.responses.create(model="policy", input="?", store=False)
        for unknown in (own.id, ids[0], "resp_none"):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="policy", input="on", previous_response_id=unknown)
            assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")

    for program in (stores, does_not):
        await run_agent(program, ReplyingEngine(lambda context: "ok"))


def test_the_newest_responses_of_a_session_are_kept() -> None:
    stored = StoredHistories()
    for number in range(MAX_STORED + 3):
        stored.add(f"resp_{number}", [ChatMessage("user", str(number))])
    assert stored.find("resp_3") == (ChatMessage("user", "3"),)
    with pytest.raises(ApiError, match="newest 64, without"):
        stored.find("resp_2")


def test_adjacent_items_of_the_assistant_are_one_message() -> None:
    body = {
        "model": "policy",
        "instructions": " Be brief. ",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": t} for t in ("one", "two")]},
            {"type": "message", "role": "user", "content": "?"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1", "phase": "commentary",
             "content": [{"type": "output_text", "text": " So. ", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"b":2, "a":1}'},
            {"type": "function_call", "call_id": "b", "name": "add", "arguments": "{broken"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "3"}]},
            {"type": "function_call_output", "call_id": "b", "output": "4"},
            {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": ""},
        ],
    }  # fmt: skip
    assert parse_response(body, Caller()).request.messages == (
        ("system", " Be brief. ", (), ""),
        ("system", "one\ntwo", (), ""),
        ("user", "?", (), ""),
        ("assistant", " So. ", (("add", '{"a": 1, "b": 2}'), ("add", "{broken")), "hm"),
        ("tool", "3", (), ""),
        ("tool", "4", (), ""),
        ("assistant", "", (("add", "{}"),), ""),
        ("tool", "", (), ""),
    )


async def test_what_has_no_effect_is_named_in_a_header() -> None:
    async with openai_client(ReplyingEngine(lambda context: "ok")) as client:
        answer = await client.responses.with_raw_response.create(
            model="policy",
            input="?",
            temperature=0.0,
            truncation="auto",
            reasoning={"effort": "low"},
            text={"verbosity": "low", "format": {"type": "text"}},
            tools=[{**TOOL, "strict": True}, {"type": "web_search"}, {"type": "custom", "name": "patch"}],
            parallel_tool_calls=True,
            tool_choice="auto",
            store=False,
            prompt_cache_key="x",
            extra_body={"client_metadata": {"a": "b"}},
        )
    named = "reasoning, truncation, text.verbosity, temperature, tools.strict, tools.web_search, tools.custom"
    assert answer.headers["x-penstock-ignored"] == named
    plain = answer.parse()
    assert [tool.name for tool in plain.tools] == ["add"]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an image": ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content", "invalid_value"),
    "a foreign item": ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "unsupported_value"),
    "no call name": (
        {"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name", "missing_required_parameter"
    ),
    "a prefilled answer": ({"input": [{"role": "assistant", "content": "I"}]}, "input", None),
    "nothing to answer": ({"input": []}, "input", "invalid_value"),
    "a number": ({"input": 3}, "input", "invalid_value"),
    "no tool name": ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    "background": ({"background": True}, "background", "unsupported_value"),
    "a conversation": ({"conversation": "conv_1"}, "conversation", "unsupported_value"),
    "unknown": ({"min_p": 0.1}, "min_p", "unknown_parameter"),
    "another model": ({"model": "gpt-5"}, "model", "model_not_found"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    "too long": ({"input": "x" * 200_000}, "input", "context_length_exceeded"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    change, param, code = REFUSED[name]
    async with openai_client(ReplyingEngine(lambda context: "ok")) as client:
        for is_stream in (False, True):
            with pytest.raises(openai.APIStatusError) as refused:
                await client.responses.create(model="policy", input="?", stream=is_stream, extra_body=change)
            assert (refused.value.param, refused.value.code) == (param, code)
            assert refused.value.status_code == (404 if code == "model_not_found" else 400)


SCHEMA = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}
IGNORABLE: dict[str, tuple[dict[str, Any], Ignorable]] = {
    "text.format": ({"text": {"format": SCHEMA}}, "response_format"),
    "tool_choice": ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
    "parallel_tool_calls": ({"parallel_tool_calls": False}, "parallel_tool_calls"),
}


@pytest.mark.parametrize("param", IGNORABLE)
async def test_what_the_policy_does_not_follow_is_refused_unless_the_user_lists_it(param: str) -> None:
    asked, key = IGNORABLE[param]
    async with openai_client(ReplyingEngine(lambda context: "ok")) as client:
        with pytest.raises(openai.BadRequestError, match=rf"env\.endpoint\.ignore=\[{key}\]") as refused:
            await client.responses.create(model="policy", input="?", **asked)
        assert refused.value.param == param
    async with openai_client(ReplyingEngine(lambda context: "ok"), ignore=(key,)) as client:
        answer = await client.responses.with_raw_response.create(model="policy", input="?", **asked)
        assert answer.headers["x-penstock-ignored"] == param


async def test_logprobs_are_in_the_text_that_asked_for_them() -> None:
    include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    async with openai_client(ReplyingEngine(lambda context: "abc")) as client:
        response: Any = await client.responses.create(model="policy", input="?", include=include)
    logprobs = response.output[0].content[0].logprobs
    assert [one.token for one in logprobs][:3] == ["a", "b", "c"]
    assert all(one.logprob < 0 for one in logprobs)


async def test_a_stream_whose_session_ends_closes_with_a_failed_response() -> None:
    async with (
        questions(StuckEngine(lambda context: "one two three")) as (access, answering),
        client_of(access) as client,
    ):
        events: list[Any] = []
        async for event in await client.responses.create(model="policy", input="?", stream=True):
            events.append(event)
            if event.type == "response.output_text.delta":
                await answering.close()
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.code == "server_error"
    assert "session ended" in events[-1].response.error.message
    assert not {"response.completed", "response.incomplete"} & {event.type for event in events}


async def test_several_programs_at_once_get_each_their_own_responses() -> None:
    async def program(client: AsyncOpenAI) -> EpisodeReply:
        name = str(client.api_key)[-6:]
        first = await client.responses.create(model="policy", input=name)
        again = await client.responses.create(model="policy", input="again", previous_response_id=first.id)
        return {"done": True, "reward": float(first.output_text == again.output_text == name)}

    engine = ReplyingEngine(lambda context: context.split("user\n")[1].split("<|im_end|>")[0])
    trajectories = await run_agents([program] * 8, engine)
    assert [one.episode.reward for one in trajectories if one.episode] == [1.0] * 8


async def test_the_key_may_be_an_x_api_key() -> None:
    async with questions(ReplyingEngine(lambda context: "ok")) as (access, _):
        for headers in ({"Authorization": "", "x-api-key": access.api_key}, {}):
            status, body, _ = await post(access, "/responses", {"model": "policy", "input": "?"}, headers=headers)
            assert (status, body["object"]) == (200, "response")
