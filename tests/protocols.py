"""Clients of the three protocols, and an endpoint where each request is a question of its own, in any order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import httpx2
import openai

from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.envs.config import EndpointConfig, Ignorable
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.endpoint.session import Questions
from penstock.envs.environment import EndpointAccess
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.recording import PolicyAnswers
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.agents import CODEC, ReplyingEngine, client_of

KEY = "a-key-of-the-run-itself"
AGENTS = Path(__file__).parent / "data" / "agents"
"""Requests of real agent programs, with placeholders for their texts."""


@asynccontextmanager
async def questions(
    engine: ReplyingEngine, *, codec: TokenCodec = CODEC, ignore: tuple[Ignorable, ...] = ()
) -> AsyncIterator[tuple[EndpointAccess, Questions]]:
    """The policy of `engine` behind an endpoint."""
    runner = TrajectoryRunner(EnginePool([engine], 8), codec, 20.0)
    sampling = SamplingParams(400, temperature=1.0, stop_token_ids=codec.stop_token_ids, seed=3)
    endpoint = Endpoint(EndpointConfig(ignore=ignore), 10.0)
    answering = Questions(KEY, PolicyAnswers(runner.codec, runner.sample_turn, 100_000, sampling).answer)
    await endpoint.answer(answering)
    async with endpoint.open("for its address") as session:
        access = EndpointAccess(session.access.base_url, KEY, session.access.model)
    try:
        yield access, answering
    finally:
        await endpoint.close()


@asynccontextmanager
async def openai_client(engine: ReplyingEngine, **kwargs: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with questions(engine, **kwargs) as (access, _), client_of(access) as client:
        yield client


@asynccontextmanager
async def anthropic_client(engine: ReplyingEngine, **kwargs: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with questions(engine, **kwargs) as (access, _), anthropic_client_of(access) as client:
        yield client


def anthropic_client_of(access: EndpointAccess) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(verify=False, trust_env=False)
    address = access.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=address, api_key=access.api_key, http_client=http)


async def post(access: EndpointAccess, path: str, body: Any, **kwargs: Any) -> tuple[int, Any, Any]:
    """Status, JSON and headers of the answer; `path` is below /v1, and bytes are sent as they are."""
    headers = {"Authorization": f"Bearer {access.api_key}", **kwargs.pop("headers", {})}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    http = aiohttp.ClientSession(headers=headers)
    async with http, http.post(access.base_url + path, data=data, **kwargs) as response:
        is_stream = response.content_type == "text/event-stream"
        said = await (response.text() if is_stream else response.json())
        return response.status, said, response.headers


def requests_of(program: str) -> tuple[Callable[[str], Callable[[str], str]], Iterator[dict[str, Any]]]:
    """The policy of each conversation of a program, and the requests that it made."""
    case = json.loads((AGENTS / f"{program}.json").read_text())

    def policy(conversation: str) -> Callable[[str], str]:
        answers = iter(case["policy_answers"][conversation])
        return lambda context: next(answers)

    return policy, (one for one in case["requests"] if one["method"] == "POST")


class StuckEngine(ReplyingEngine):
    """Says three tokens and then nothing more."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        said = 0
        async for delta in super().generate(request):
            yield delta
            said += 1
            if said == 3:
                await asyncio.Event().wait()
