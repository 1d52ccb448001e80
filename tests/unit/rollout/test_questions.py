"""Plain questions to the policy, by the official client and a judge: answered on the engines, recorded nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from penstock.dataflow.errors import ConfigError, EngineLostError
from penstock.dataflow.ids import RequestId, TaskId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.envs.config import EndpointConfig
from penstock.envs.endpoint import session
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.endpoint.session import Questions
from penstock.envs.environment import EndpointAccess
from penstock.platform.checks.load import compose_config
from penstock.platform.run.serving import answer_questions, episode_player
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.recording import PolicyAnswers
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.agents import CODEC, ReplyingEngine, chat, client_of, user
from tests.unit.envs.test_judge import answered, make

KEY = "a-key-of-the-run-itself"


@asynccontextmanager
async def questions_client(engine: ReplyingEngine) -> AsyncIterator[tuple[openai.AsyncOpenAI, EndpointAccess]]:
    """The policy of `engine` behind an endpoint, and a client with the run's key."""
    runner = TrajectoryRunner(EnginePool([engine], 8), CODEC, 20.0)
    sampling = SamplingParams(200, temperature=1.0, stop_token_ids=CODEC.stop_token_ids, seed=3)
    endpoint = Endpoint(EndpointConfig(), 10.0)
    await endpoint.answer(Questions(KEY, PolicyAnswers(runner.codec, runner.sample_turn, 500, sampling).answer))
    async with endpoint.open("for its address") as session:
        access = EndpointAccess(session.access.base_url, KEY, session.access.model)
    try:
        async with client_of(access) as client:
            yield client, access
    finally:
        await endpoint.close()


async def test_questions_are_answered_concurrently_and_separately() -> None:
    engine = ReplyingEngine(lambda context: "Score: 7" if "good" in context else "Score: 2")
    async with questions_client(engine) as (client, _):
        texts = ["good one" if index % 2 else f"bad {index}" for index in range(40)]
        answers = await asyncio.gather(*(chat(client, [user(text)]) for text in texts))
        assert [one.choices[0].message.content for one in answers] == ["Score: 2", "Score: 7"] * 20
        streamed = [chunk async for chunk in await chat(client, [user("good")], stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == "Score: 7"
        assert (await client.models.list()).data[0].id == "policy"
    assert len({name for name, _, _ in engine.served}) == 41, "a question is not a turn of another conversation"


async def test_a_judge_asks_the_policy_itself_for_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    async with questions_client(ReplyingEngine(lambda _: "Score: 9")) as (_, access):
        monkeypatch.setenv("JUDGE_KEY", KEY)
        reward = make(access.base_url, model=access.model, key_variable="JUDGE_KEY")
        assert (await reward(answered("1"), answer="2"))["reward"] == 0.9
        await reward.close()


async def test_questions_take_slots_as_rollouts_do_and_both_go_on() -> None:
    engine = ReplyingEngine(lambda _: "Score: 1", may_go_on=asyncio.Event())
    runner = TrajectoryRunner(EnginePool([engine], 2), CODEC, 20.0)
    sampling = SamplingParams(50, stop_token_ids=CODEC.stop_token_ids)
    answers = PolicyAnswers(runner.codec, runner.sample_turn, 500, sampling)
    exchanges = [Questions(KEY, answers.answer).submit(_request(f"q{index}")) for index in range(3)]
    task = Task(TaskId("t"), [{"role": "user", "content": "?"}])
    rollout = asyncio.create_task(runner.run(RolloutContext(task, "0"), 0, sampling))
    await asyncio.sleep(0.01)
    assert len(engine.served) == 2
    assert engine.may_go_on is not None
    engine.may_go_on.set()
    assert [(await one.result()).text for one in exchanges] == ["Score: 1"] * 3
    assert (await rollout).response == "Score: 1"


async def test_what_cannot_be_answered_has_the_apis_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    async with questions_client(ReplyingEngine(lambda _: "x")) as (client, access):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await chat(client, [user("word " * 600)])
        async with client_of(EndpointAccess(access.base_url, KEY[:-1], access.model)) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await chat(stranger, [user("?")])
        monkeypatch.setattr(session, "MAX_QUESTIONS", 0)
        with pytest.raises(openai.RateLimitError):
            await client.with_options(max_retries=0).chat.completions.create(model="policy", messages=[user("?")])


class LostEngine(ReplyingEngine):
    async def generate(self, _request: object) -> AsyncIterator[object]:  # type: ignore[override]
        raise EngineLostError.final("it died")
        yield

    async def abort(self, request_id: RequestId) -> None:
        """It is gone."""


async def test_without_engines_a_question_fails_and_says_why() -> None:
    async with questions_client(LostEngine(lambda _: "")) as (client, _):
        with pytest.raises(openai.InternalServerError, match="no rollout engine is left"):
            await client.with_options(max_retries=0).chat.completions.create(model="policy", messages=[user("?")])


async def test_a_run_answers_only_with_a_key_that_cannot_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["experiment=arithmetic", "+env.endpoint={key_variable: PENSTOCK_KEY}"]
    runner = TrajectoryRunner(EnginePool([ReplyingEngine(lambda _: "1")], 2), CODEC, 20.0)
    sampling = SamplingParams(50, stop_token_ids=CODEC.stop_token_ids)
    for key, found in ((None, "0 characters"), ("short", "5 characters")):
        if key is not None:
            monkeypatch.setenv("PENSTOCK_KEY", key)
        config = compose_config(overrides)
        async with episode_player(config, CODEC) as episodes:
            with pytest.raises(ConfigError, match=f"PENSTOCK_KEY: the key has {found}, expected at least 16"):
                await answer_questions(config, episodes, runner, sampling)
    monkeypatch.setenv("PENSTOCK_KEY", KEY)
    async with episode_player(config, CODEC) as episodes:
        await answer_questions(config, episodes, runner, sampling)
        assert episodes.endpoint is not None
        async with episodes.endpoint.open("for its address") as session:
            access = EndpointAccess(session.access.base_url, KEY, session.access.model)
        async with client_of(access) as client:
            assert (await chat(client, [user("?")])).choices[0].message.content == "1"


def _request(text: str) -> object:
    from penstock.envs.endpoint.chat_api import parse_chat
    from penstock.envs.endpoint.requests import Caller

    return parse_chat({"model": "policy", "messages": [user(text)]}, Caller()).request
