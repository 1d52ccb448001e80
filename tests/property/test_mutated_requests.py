"""Whatever a program sends, it gets an answer or a refusal in the form of its protocol, and the endpoint goes on."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from penstock.envs.endpoint import server
from penstock.envs.environment import EndpointAccess
from tests.agents import ReplyingEngine
from tests.protocols import post, questions, requests_of

NUM_MUTANTS = 250
CALL = 'Well. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def bodies() -> dict[str, list[dict[str, Any]]]:
    """Path below /v1 -> bodies that are answered."""
    _, of_codex = requests_of("codex")
    _, of_claude = requests_of("claude-code")
    chat = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "?"}]},
            {"role": "assistant", "content": "x", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
        "max_tokens": 9, "stop": ["END"], "temperature": 1, "stream": True, "stream_options": {"include_usage": True},
        "logprobs": True, "n": 1, "tool_choice": "auto", "response_format": {"type": "text"},
    }  # fmt: skip
    plain = {"model": "policy", "prompt": "?", "max_tokens": 9, "stop": "END", "logprobs": 0, "echo": False}
    response = {
        "model": "policy", "input": "?", "instructions": "s", "text": {"format": {"type": "text"}}, "store": True,
        "include": ["message.output_text.logprobs"], "max_output_tokens": 9, "truncation": "disabled", "top_p": 1,
    }  # fmt: skip
    message = {
        "model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}], "system": "s",
        "stop_sequences": ["END"], "tools": [{"name": "add", "input_schema": SCHEMA, "type": "custom"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "thinking": {"type": "disabled"},
    }  # fmt: skip
    return {
        "/chat/completions": [chat],
        "/completions": [plain],
        "/responses": [response, *(one["body"] for one in of_codex)],
        "/messages?beta=true": [
            message,
            *(one["body"] for one in of_claude if "format" not in one["body"]["output_config"]),
        ],
    }


JUNK: list[Any] = [
    None, True, False, 0, -1, 1e308, float("nan"), 2**70, "", "x", "\ud83d", "\x00\r\n<|im_end|>", "policy", "user",
    "assistant", "tool_result", "function_call", "image", [], {}, [[]], [{}], [None], {"type": "image"}, {"type": []},
    {"type": "text", "text": 3}, {"role": "assistant"}, ["x"] * 40, json.loads("[" * 99 + "]" * 99),
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a body with each of its keys."""
    own = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [(value, key) for key in own] + [place for key in own for place in places(value[key])]


def mutated(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        container, key = rng.choice(places(body) or [(body, "model")])
        kind = rng.randrange(5)
        if kind == 0 and isinstance(container, dict):
            del container[key]
        elif kind == 1:
            container[key] = copy.deepcopy(rng.choice([other[at] for other, at in places(body)]))
        elif kind == 2 and isinstance(container, dict):
            container[rng.choice(["min_p", "strict", "n", "", "é\r\nx", "type"])] = copy.deepcopy(rng.choice(JUNK))
        elif kind == 3 and isinstance(container, list):
            container.insert(rng.randrange(len(container) + 1), copy.deepcopy(rng.choice(JUNK)))
        else:
            container[key] = copy.deepcopy(rng.choice(JUNK))
    return body


def check_refusal(path: str, status: int, body: Any) -> None:
    error = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if path.startswith("/messages"):
        assert body["type"] == "error"
        assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    else:
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.some(2)
@pytest.mark.parametrize("path", bodies())
async def test_every_mutant_of_a_body_is_answered_or_refused_in_the_form_of_the_protocol(path: str) -> None:
    statuses: Counter[int] = Counter()
    rng = random.Random(7)
    originals = bodies()[path]
    async with questions(ReplyingEngine(lambda context: CALL)) as (access, _):
        for original in originals:
            assert (await post(access, path, original))[0] == 200
        for _ in range(NUM_MUTANTS):
            mutant = mutated(rng.choice(originals), rng)
            status, said, _ = await post(access, path, mutant)
            statuses[status] += 1
            if status == 200:
                assert said.startswith(("data: ", "event: ")) if isinstance(said, str) else said["model"] == "policy"
                assert "session_ended" not in str(said)
            else:
                assert 400 <= status < 500, (status, mutant, said)
                check_refusal(path, status, said)
    assert set(statuses) <= {200, 400, 404}
    assert min(statuses[200], statuses[400]) > 20, "the mutants are neither all good nor all bad"


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda body: body[: len(body) // 2],
    "nothing": lambda body: b"",
    "a list": lambda body: b"[" + body + b"]",
    "a number": lambda body: b"3",
    "no text": lambda body: b"\xff\xfe\xfd" + body,
    "a zero byte": lambda body: body + b"\x00",
    "deep": lambda body: b'{"model": ' * 5000,
    "nested": lambda body: body[:-1] + b', "metadata": {"of no meaning": ' + b"[" * 200 + b"]" * 200 + b"}}",
}


@pytest.mark.parametrize("path", bodies())
@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_body_is_400_in_the_form_of_the_protocol(path: str, name: str) -> None:
    body = json.dumps(bodies()[path][0]).encode()
    async with questions(ReplyingEngine(lambda context: "ok")) as (access, _):
        status, said, _ = await post(access, path, BROKEN[name](body))
        assert status == 400
        check_refusal(path, status, said)
        status, said, _ = await post(access, path, body, headers={"Content-Encoding": "gzip"})
        assert status == 400
        check_refusal(path, status, said)
        assert (await post(access, path, body))[0] == 200


@pytest.mark.parametrize("path", bodies())
async def test_a_body_that_stops_in_the_middle_is_408_and_one_that_is_too_large_413(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.2)
    async with questions(ReplyingEngine(lambda context: "ok")) as (access, _):
        status, said = await unfinished(access, path)
        assert (status, said["error"]["message"]) == (408, "The body did not arrive within 0.2 s.")
        assert said["error"]["type"] == ("timeout_error" if path.startswith("/messages") else "invalid_request_error")
        large = json.dumps({"model": "policy", "messages": "x" * (10 << 20)}).encode()
        status, said, headers = await post(access, path, large)
        assert (status, headers["x-should-retry"]) == (413, "false")
        check_refusal(path, status, said)


async def unfinished(access: EndpointAccess, path: str) -> tuple[int, Any]:
    """The answer to a request whose body never ends."""

    async def half() -> Any:
        yield b'{"model": '
        await asyncio.sleep(5)

    headers = {"x-api-key": access.api_key}
    http = aiohttp.ClientSession(headers=headers)
    async with http, http.post(access.base_url + path, data=half()) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
@pytest.mark.parametrize("key", [b"", b"pk-1-x", b"\xff\xfe", "é".encode(), b"x" * 4000])
async def test_a_wrong_key_is_401_in_the_form_of_the_protocol_before_the_body_is_read(header: str, key: bytes) -> None:
    async with questions(ReplyingEngine(lambda context: "ok")) as (access, _):
        port = int(access.base_url.split(":")[2].removesuffix("/v1"))
        for path in (*bodies(), "/models"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            method = b"GET" if path == "/models" else b"POST"
            scheme = b"Bearer " if header == "Authorization" else b""
            writer.write(method + f" /v1{path} HTTP/1.1\r\nHost: x\r\n{header}: ".encode() + scheme + key)
            writer.write(b"\r\nContent-Length: 100000\r\n\r\n{")
            assert (await reader.readline()).split()[1] == b"401"
            said = (await reader.read(2000)).partition(b"\r\n\r\n")[2]
            error = json.loads(said)["error"]
            kind = "authentication_error" if path.startswith("/messages") else "invalid_request_error"
            assert error["type"] == kind
            writer.close()
