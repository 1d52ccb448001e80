"""Agent programs played in the test's own event loop, against engines with scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openai

from penstock.dataflow.ids import EngineId, RequestId, TaskId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.dataflow.versions import Span
from penstock.envs.config import EndpointConfig, Ignorable, TrainedThreads
from penstock.envs.endpoint.scripted import ScriptedPolicy
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.endpoint.session import Session
from penstock.envs.environment import EndpointAccess
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.chat_tokenizers import chat_tokenizer

CODEC = TokenCodec(chat_tokenizer("chatml"))
Program = Callable[[openai.AsyncOpenAI], Awaitable[EpisodeReply | None]]


@dataclass
class ReplyingEngine:
    """Answers `reply(text of the context)`, encoded letter by letter, so that its ids differ from those of the text."""

    reply: Callable[[str], str]
    codec: TokenCodec = CODEC
    engine_id: EngineId = field(default_factory=lambda: EngineId("replying"))
    version: int = 0
    served: list[tuple[str, tuple[int, ...], list[int]]] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    may_go_on: asyncio.Event | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        text = self.reply(self.codec.tokenizer.decode(request.prompt_token_ids))
        letters = [self.codec.tokenizer.encode(letter, add_special_tokens=False) for letter in text]
        token_ids = [*(token for letter in letters for token in letter), self.codec.stop_token_ids[0]]
        sampled: list[int] = []
        self.served.append((request.request_id.partition("#")[0], request.prompt_token_ids, sampled))
        for token in token_ids[: request.sampling.max_new_tokens]:
            await asyncio.sleep(0)
            if self.may_go_on is not None:
                await self.may_go_on.wait()
            sampled.append(token)
            is_full = len(sampled) == request.sampling.max_new_tokens
            reason = "stop" if token in self.codec.stop_token_ids else "length" if is_full else None
            yield TokenDelta((token,), (-1.0 / (1 + token),), (Span(self.version, 1),), reason)  # type: ignore[arg-type]

    async def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    async def load(self) -> EngineLoad:
        return EngineLoad(self.version, 0, 0, 0.0, 0, 0.0)


class InThisLoop:
    """Plays the program of each task with an `openai` client; its return value is the reply."""

    def __init__(self, programs: dict[str, Program]) -> None:
        self.programs = programs

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Any]:
        yield _Run(self.programs[task.task_id])


class _Run:
    def __init__(self, program: Program) -> None:
        self._program = program

    async def reset(self) -> EpisodeReply:
        return {"runs_itself": True}

    async def run(self, access: EndpointAccess) -> EpisodeReply:
        async with client_of(access) as client:
            return await self._program(client) or {"done": True}

    async def cut_off(self) -> EpisodeReply:
        return {"done": True}


def client_of(access: EndpointAccess) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, http_client=http)


async def run_agents(
    programs: list[Program],
    engine: Any,
    *,
    codec: TokenCodec = CODEC,
    max_turns: int = 8,
    max_tokens: int = 2000,
    max_new_tokens: int = 200,
    timeout_s: float = 10.0,
    stop: tuple[str, ...] = (),
    threads: TrainedThreads = "agent",
    ignore: tuple[Ignorable, ...] = (),
) -> list[Trajectory]:
    """Run all programs concurrently; returns one trajectory of each."""
    endpoint = Endpoint(EndpointConfig(ignore=ignore), timeout_s)
    tasks = [Task(TaskId(f"t/{index}"), "?", {}, "") for index in range(len(programs))]
    source = InThisLoop({task.task_id: program for task, program in zip(tasks, programs, strict=True)})
    player = EpisodePlayer(source.open, codec, EpisodeBudget(max_turns, max_tokens), endpoint, threads)
    runner = TrajectoryRunner(EnginePool([engine], 64), codec, 20.0, episodes=player)
    sampling = SamplingParams(max_new_tokens, stop_token_ids=codec.stop_token_ids, stop=stop)
    try:
        runs = [runner.run(RolloutContext(task, task.task_id), 0, sampling) for task in tasks]
        return list(await asyncio.wait_for(asyncio.gather(*runs), 60))
    finally:
        await endpoint.close()


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def chat(client: openai.AsyncOpenAI, messages: list[Any], **kwargs: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **kwargs)


async def run_agent(program: Program, engine: Any, **kwargs: Any) -> Trajectory:
    (trajectory,) = await run_agents([program], engine, **kwargs)
    return trajectory


def check_tokens(engine: ReplyingEngine, trajectory: Trajectory) -> None:
    """Check that every request continued exactly the earlier tokens, and that the mask marks the sampled tokens."""
    served = [(prompt, ids) for name, prompt, ids in engine.served if name == trajectory.trajectory_id]
    token_ids, mask = trajectory.token_ids.tolist(), np.zeros(len(trajectory.token_ids), np.bool_)
    assert trajectory.episode is not None
    assert len(served) == len(trajectory.episode.turns)
    for turn, (prompt, sampled) in zip(trajectory.episode.turns, served, strict=True):
        kept = sampled[: turn.num_tokens]
        assert token_ids[: len(prompt) + len(kept)] == [*prompt, *kept]
        mask[len(prompt) : len(prompt) + len(kept)] = True
    np.testing.assert_array_equal(trajectory.loss_mask, mask)
    expected = np.where(mask, np.float32(-1.0) / (1 + trajectory.token_ids), np.float32(0)).astype(np.float32)
    np.testing.assert_allclose(trajectory.behavior_logprobs, expected, rtol=1e-6)


@asynccontextmanager
async def scripted_session(says: str, config: EndpointConfig) -> AsyncIterator[Session]:
    """A session whose policy always gives the same answer, and whose program runs until the end of the context."""
    endpoint, is_over = Endpoint(config, 10.0), asyncio.Event()

    async def program() -> EpisodeReply:
        await is_over.wait()
        return {"done": True}

    async def policy(content: object) -> str:
        return says

    async with endpoint.open("t/0") as opened:
        serving = asyncio.create_task(opened.serve(program(), ScriptedPolicy(policy).answer))
        yield opened
        is_over.set()
        await serving
    await endpoint.close()
