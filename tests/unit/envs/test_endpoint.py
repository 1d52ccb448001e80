"""The endpoint refuses in the forms of the OpenAI API, so that clients raise their own exceptions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import EndpointConfig
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.endpoint.session import Session
from penstock.envs.reasoning import num_begun
from tests.agents import client_of, scripted_session

CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}


@pytest_asyncio.fixture
async def session() -> AsyncIterator[Session]:
    """A session whose policy answers `yes`, and whose program runs until the end of the test."""
    async with scripted_session("yes", EndpointConfig()) as opened:
        yield opened


async def ask(session: Session, body: Any, path: str = "/chat/completions", **kwargs: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {session.access.api_key}"} | kwargs.pop("headers", {})
    async with aiohttp.ClientSession(headers=headers) as http:
        data = {"data": body} if isinstance(body, (bytes, str)) else {"json": body}
        async with http.post(session.access.base_url + path, **data, **kwargs) as response:
            return response.status, await response.json()


BAD: dict[str, tuple[Any, str | None, str | None]] = {
    "no model": ({"messages": CHAT["messages"]}, "model", "missing_required_parameter"),
    "no messages": ({"model": "policy"}, "messages", "missing_required_parameter"),
    "empty messages": ({**CHAT, "messages": []}, "messages", "invalid_value"),
    "no role": ({**CHAT, "messages": [{"content": "?"}]}, "messages[0].role", "missing_required_parameter"),
    "an image": (
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "invalid_value",
    ),
    "a prefilled answer": (
        {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "I"}]},
        "messages",
        None,
    ),
    "n": ({**CHAT, "n": 2}, "n", "unsupported_value"),
    "logit_bias": ({**CHAT, "logit_bias": {"1": 5}}, "logit_bias", "unsupported_value"),
    "penalty": ({**CHAT, "presence_penalty": 0.5}, "presence_penalty", "unsupported_value"),
    "json mode": ({**CHAT, "response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
    "forced tool": ({**CHAT, "tool_choice": "required"}, "tool_choice", "unsupported_value"),
    "alternatives": ({**CHAT, "logprobs": True, "top_logprobs": 3}, "top_logprobs", "unsupported_value"),
    "no tokens": ({**CHAT, "max_tokens": 0}, "max_tokens", "invalid_value"),
    "text for a number": ({**CHAT, "max_tokens": "7"}, "max_tokens", "invalid_value"),
    "an empty stop": ({**CHAT, "stop": ["a", ""]}, "stop", "invalid_value"),
    "unknown": ({**CHAT, "min_p": 0.1}, "min_p", "unknown_parameter"),
    "a list": ([1], None, None),
    "no JSON": ("{", None, None),
    "deep JSON": ("[" * 9000, None, None),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_body_is_400_with_the_parameter_and_the_session_goes_on(session: Session, name: str) -> None:
    body, param, code = BAD[name]
    status, answer = await ask(session, body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]
    status, answer = await ask(session, CHAT)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "yes")
    assert session.counts == {"requests": 2, "refused": 1, "ignored_parameters": 0}


async def test_prompts_of_completions_are_one_text(session: Session) -> None:
    for prompt in (["a", "b"], [1, 2], None):
        status, answer = await ask(session, {"model": "policy", "prompt": prompt}, "/completions")
        assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_neutral_values_and_fields_of_answers_that_are_sent_back_are_accepted(session: Session) -> None:
    neutral = {"n": 1, "logit_bias": {}, "response_format": {"type": "text"}, "user": "me", "stop": None, "tools": []}
    _, answer = await ask(session, {**CHAT, **neutral, "temperature": 1})
    message = {**answer["choices"][0]["message"], "annotations": [], "audio": None, "function_call": None}
    more = [*CHAT["messages"], message, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    assert (await ask(session, {**CHAT, "messages": more}))[0] == 200


async def test_what_has_no_effect_is_reported_in_a_header_and_counted(session: Session) -> None:
    tool = {"type": "function", "function": {"name": "add", "strict": True}}
    async with openai.AsyncOpenAI(base_url=session.access.base_url, api_key=session.access.api_key) as client:
        create = client.chat.completions.with_raw_response.create
        answer = await create(**CHAT, temperature=0.0, tools=[tool])  # type: ignore[list-item]
    assert answer.headers["x-penstock-ignored"] == "temperature, tools.strict"
    assert session.counts == {"requests": 1, "ignored_parameters": 1}


IGNORABLE: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.mark.parametrize("name", IGNORABLE)
async def test_what_the_policy_does_not_follow_is_refused_unless_the_user_lists_it(session: Session, name: str) -> None:
    body = {**CHAT, name: IGNORABLE[name]}
    status, answer = await ask(session, body)
    assert (status, answer["error"]["param"]) == (400, name)
    assert f"env.endpoint.ignore=[{name}]" in answer["error"]["message"]
    async with scripted_session("yes", EndpointConfig(ignore=(name,))) as opened:  # type: ignore[arg-type]
        assert (await ask(opened, body))[0] == 200
        assert opened.counts == {"requests": 1, "ignored_parameters": 1}


async def test_the_key_may_be_an_x_api_key(session: Session) -> None:
    headers = {"Authorization": "", "x-api-key": session.access.api_key}
    assert (await ask(session, CHAT, headers=headers))[0] == 200
    headers["x-api-key"] += "~"
    assert (await ask(session, CHAT, headers=headers))[0] == 401


async def test_a_streamed_answer_with_a_call_has_the_text_of_the_whole_one() -> None:
    said = '\n So. \n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> and more'
    tool: Any = {"type": "function", "function": {"name": "add"}}
    texts = []
    for is_stream in (False, True):
        async with scripted_session(said, EndpointConfig()) as opened, client_of(opened.access) as client:
            answer: Any = await client.chat.completions.create(**CHAT, tools=[tool], stream=is_stream)
            if is_stream:
                texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in answer]))
            else:
                texts.append(answer.choices[0].message.content)
    assert texts == ["\n So.", "\n So."]


@pytest.mark.parametrize("key", ["", "pk-1-wrong", "pk-2-x", "sk-real", "pk-1-é"])
async def test_a_wrong_key_is_401_before_anything_is_read(session: Session, key: str) -> None:
    for path in ("/chat/completions", "/completions"):
        status, answer = await ask(session, b"x" * (5 << 20), path, headers={"Authorization": f"Bearer {key}"})
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert session.counts == {}


async def test_the_official_client_raises_its_own_exceptions(session: Session) -> None:
    access = session.access
    async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        assert [model.id async for model in client.models.list()] == [access.model]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(**{**CHAT, "model": "gpt-5"})
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.embeddings.create(model="policy", input="x")
        assert missing.value.code == "unknown_url"
        long = [{"role": "user", "content": "x" * (5 << 20)}]
        with pytest.raises(openai.APIStatusError) as large:
            await client.chat.completions.create(**{**CHAT, "messages": long})
        assert (large.value.status_code, large.value.code) == (413, "too_large")
        stranger = client.with_options(api_key=access.api_key[:-1] + "~")
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(**CHAT)
    status, answer = await ask(session, CHAT, "/models")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")


async def test_an_address_in_use_is_a_configuration_error(session: Session) -> None:
    port = int(session.access.base_url.split(":")[-1].removesuffix("/v1"))
    second = Endpoint(EndpointConfig(port=port), 10.0)
    with pytest.raises(ConfigError, match=f"env.endpoint: cannot listen on 127.0.0.1 port {port}"):
        await second.open("x").__aenter__()


def test_what_may_become_a_stop_text_is_held_back() -> None:
    assert [num_begun(text, ["END", "\n\n"]) for text in ("", "E", "xEN", "END", "a\n", "Ex")] == [0, 1, 2, 0, 1, 0]
    assert num_begun("anything", []) == 0
