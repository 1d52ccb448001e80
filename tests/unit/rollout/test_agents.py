"""Programs that use the official OpenAI client become trajectories of exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from penstock.envs.workers.episode_child import EpisodeReply
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from tests.agents import CODEC, Program, ReplyingEngine, chat, check_tokens, run_agent, run_agents, user
from tests.chat_tokenizers import chat_tokenizer, family_tokenizer
from tests.fakes import FakeEngine

NUM_CLIENTS = 32


async def test_32_streaming_clients_get_each_their_own_answers_and_every_token_is_kept_as_it_was_sampled() -> None:
    def reply(context: str) -> str:
        names = re.findall(r"client (\d+)\.", context)
        return f"né ✓ {names[-1]} " * (1 + int(names[-1]) % 5) + str(len(names))

    all_at_once = asyncio.Barrier(NUM_CLIENTS)
    said: dict[int, list[str]] = {}
    usage: dict[int, list[Any]] = {}

    def program(index: int) -> Program:
        async def talk(client: AsyncOpenAI) -> EpisodeReply:
            messages: list[Any] = []
            for _ in range(3):
                await all_at_once.wait()
                messages.append(user(f"client {index}."))
                text = ""
                options: Any = {"stream": True, "stream_options": {"include_usage": True}}
                async for chunk in await chat(client, messages, **options):
                    if chunk.choices:
                        text += chunk.choices[0].delta.content or ""
                    else:
                        usage.setdefault(index, []).append(chunk.usage)
                said.setdefault(index, []).append(text)
                messages.append({"role": "assistant", "content": text})
            return {"done": True, "reward": float(index)}

        return talk

    engine = ReplyingEngine(reply)
    trajectories = await run_agents([program(index) for index in range(NUM_CLIENTS)], engine)
    for index, trajectory in enumerate(trajectories):
        check_tokens(engine, trajectory)
        assert trajectory.episode is not None
        assert said[index] == [f"né ✓ {index} " * (1 + index % 5) + str(turn) for turn in (1, 2, 3)]
        assert [turn.response for turn in trajectory.episode.turns] == said[index]
        assert (trajectory.episode.reward, trajectory.episode.end) == (float(index), "done")
        assert [one.completion_tokens for one in usage[index]] == [t.num_tokens for t in trajectory.episode.turns]
        assert usage[index][-1].total_tokens == len(trajectory.token_ids)
    text = CODEC.tokenizer.decode(trajectories[7].token_ids.tolist())
    rendered = CODEC.tokenizer.apply_chat_template(
        [one for text in said[7] for one in (user("client 7."), {"role": "assistant", "content": text})], tokenize=False
    )
    assert text == rendered.removesuffix("\n")


TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = 'One moment.\n<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'


HERMES = TokenCodec(chat_tokenizer("hermes"))


@pytest.mark.parametrize("codec", [CODEC, HERMES], ids=["told_by_us", "told_by_the_template"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_tool_calls_are_read_as_in_our_own_tool_environments_and_their_results_are_observations(
    is_stream: bool, codec: TokenCodec
) -> None:
    def reply(context: str) -> str:
        assert ("# Tools" in context) == (codec is HERMES)
        assert '<tools>\n{"type": "function", "function": {"name": "add"' in context
        return "3" if "<tool_response>" in context else CALLS

    async def program(client: AsyncOpenAI) -> None:
        messages = [user("1+2?")]
        if is_stream:
            async with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as stream:
                choice = (await stream.get_final_completion()).choices[0]
        else:
            choice = (await chat(client, messages, tools=TOOLS)).choices[0]
        assert (choice.finish_reason, (choice.message.content or "").strip()) == ("tool_calls", "One moment.")
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
        sent_back = {"role": "assistant", "content": choice.message.content, "tool_calls": [call.model_dump()]}
        for part in sent_back["tool_calls"]:
            part["function"].pop("parsed_arguments", None)
        messages += [sent_back, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        assert (await chat(client, messages, tools=TOOLS)).choices[0].message.content == "3"

    engine = ReplyingEngine(reply, codec)
    trajectory = await run_agent(program, engine, codec=codec)
    check_tokens(engine, trajectory)
    assert trajectory.episode is not None
    assert [turn.response for turn in trajectory.episode.turns] == [CALLS, "3"]
    assert trajectory.episode.turns[0].observation.count("tool_response") == 2


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_white_space_around_a_result_is_kept_and_does_not_change_a_history(path: str) -> None:
    def result(text: str) -> Any:
        if path == "messages":
            return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": text}]}
        if path == "responses":
            return {"type": "function_call_output", "call_id": "x", "output": text}
        return {"role": "tool", "tool_call_id": "x", "content": text}

    async def program(client: AsyncOpenAI) -> None:
        first = [user("?"), {"role": "assistant", "content": "look"}, result("    if a:\n        b\n")]
        then = [*first[:2], result("if a:\n        b"), {"role": "assistant", "content": "ok\n"}, user("more")]
        for messages in (first, then):
            given = {"input" if path == "responses" else "messages": messages}
            limit = {"max_tokens": 99} if path == "messages" else {}
            await client.post(f"/{path}", body={"model": "policy", **given, **limit}, cast_to=object)

    trajectory = await run_agent(program, ReplyingEngine(lambda context: "ok"))
    assert trajectory.episode is not None
    assert (len(trajectory.episode.turns), trajectory.threads) == (2, ()), "one history"
    assert "<tool_response>\n    if a:\n        b\n\n</tool_response>" in trajectory.prompt


@pytest.mark.parametrize("family", ["mistral", "harmony"])
async def test_results_reach_templates_that_refuse_them_without_their_call(family: str) -> None:
    async def program(client: AsyncOpenAI) -> None:
        messages = [user("1+2?")]
        for _ in range(2):
            answer = (await chat(client, messages, tools=TOOLS)).choices[0].message
            messages += [answer, {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "3"}]

    codec = TokenCodec(family_tokenizer(family))
    engine = ReplyingEngine(lambda context: CALLS, codec)
    trajectory = await run_agent(program, engine, codec=codec)
    check_tokens(engine, trajectory)
    assert trajectory.episode is not None
    expected = {
        "mistral": "[TOOL_RESULTS]call00000 3[/TOOL_RESULTS]",
        "harmony": '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant',
    }
    assert [turn.observation for turn in trajectory.episode.turns] == [expected[family], ""]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_malformed_call_stays_text_as_a_whole(is_stream: bool) -> None:
    text = "so <tool_call>{not json</tool_call>"

    async def program(client: AsyncOpenAI) -> None:
        answer = await chat(client, [user("?")], tools=TOOLS, stream=is_stream)
        if is_stream:
            chunks = [chunk.choices[0] async for chunk in answer]
            assert "".join(chunk.delta.content or "" for chunk in chunks) == text
            assert chunks[-1].finish_reason == "stop"
        else:
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")

    await run_agent(program, ReplyingEngine(lambda context: text))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it(is_stream: bool) -> None:
    async def program(client: AsyncOpenAI) -> None:
        answer = await chat(client, [user("?")], stop=["END", "zzz"], stream=is_stream)
        if is_stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        else:
            assert answer.choices[0].finish_reason == "stop"
            text = answer.choices[0].message.content
        assert text == "EN 1 E"
        await chat(client, [user("?"), {"role": "assistant", "content": text}, user("and?")])

    engine = ReplyingEngine(lambda context: "fine" if "and?" in context else "EN 1 EEND and more, never seen")
    trajectory = await run_agent(program, engine)
    check_tokens(engine, trajectory)
    assert trajectory.episode is not None
    assert [turn.response for turn in trajectory.episode.turns] == ["EN 1 EEND", "fine"]
    assert len(engine.aborted) == 1
    assert trajectory.spans[0].num_tokens == trajectory.num_sampled_tokens == len("EN 1 EEND") + len("fine") + 1


async def test_limits_logprobs_and_usage_are_those_of_the_trajectory() -> None:
    async def program(client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.with_raw_response.create(
            model="policy", messages=[user("?")], max_completion_tokens=4, logprobs=True, temperature=0.3, seed=1
        )
        assert whole.headers["x-penstock-ignored"] == "temperature, seed"
        answer: Any = whole.parse()
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", "abcd")
        assert [token.token for token in answer.choices[0].logprobs.content] == list("abcd")
        logprobs.extend(token.logprob for token in answer.choices[0].logprobs.content)
        assert (answer.usage.completion_tokens, answer.system_fingerprint) == (4, "policy-v5")

    logprobs: list[float] = []
    trajectory = await run_agent(program, ReplyingEngine(lambda context: "abcdefgh", version=5))
    np.testing.assert_allclose(trajectory.behavior_logprobs[trajectory.loss_mask], logprobs)
    assert trajectory.episode is not None
    assert trajectory.episode.counts == {"requests": 1.0, "ignored_parameters": 1.0}
    assert trajectory.episode.reward is None


async def test_a_policy_without_a_chat_template_says_so_and_unknown_characters_are_named() -> None:
    async def program(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await chat(client, [user("?")])
        with pytest.raises(openai.BadRequestError, match="it knows no 'h'"):
            await client.completions.create(model="policy", prompt="hello")
        await client.completions.create(model="policy", prompt="1+1=")

    trajectory = await run_agent(program, FakeEngine(), codec=TokenCodec(character_tokenizer()))
    assert trajectory.episode is not None
    assert trajectory.episode.counts == {"requests": 3.0, "refused": 2.0, "ignored_parameters": 0.0}


async def test_plain_completions_go_on_from_their_own_text() -> None:
    codec = TokenCodec(character_tokenizer())

    async def program(client: AsyncOpenAI) -> None:
        first = await client.completions.create(model="policy", prompt="1+1=", logprobs=0)
        text = first.choices[0].text
        assert len(first.choices[0].logprobs.token_logprobs) == first.usage.completion_tokens == 3  # type: ignore[union-attr]
        chunks = await client.completions.create(model="policy", prompt=[f"1+1={text}<"], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in chunks])
        with pytest.raises(openai.BadRequestError, match=r"only one text is supported, got 2, of \['str'\]"):
            await client.completions.create(model="policy", prompt=["1", "2"])
        with pytest.raises(openai.BadRequestError, match="does not begin with") as refused:
            await client.completions.create(model="policy", prompt="2+2=")
        assert refused.value.code == "history_changed"
        with pytest.raises(openai.BadRequestError, match="cannot be mixed"):
            await chat(client, [user("?")])

    trajectory = await run_agent(program, FakeEngine(), codec=codec, threads="strict")
    assert trajectory.loss_mask.tolist() == [False] * 4 + [True] * 3 + [False] + [True] * 3
