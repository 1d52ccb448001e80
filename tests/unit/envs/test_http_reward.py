"""A reward over HTTP, against a real server that fails as planned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.trajectory import Episode, Turn
from penstock.envs.config import RewardConfig
from penstock.envs.contract import RewardContext
from penstock.envs.http_client import JsonClient, NoAnswerError
from penstock.envs.loading import load_reward
from penstock.envs.retrying import RetryConfig, parse_retry_after
from penstock.envs.rewards.http_reward import HttpReward, RewardServiceError
from penstock.envs.workers.scoring import RewardRunner
from tests.answers import answered, pair
from tests.unit.envs.http_service import Handler, Service, answer, hang, hang_up, raw, serving

FN = "penstock.envs.rewards.http_reward:HttpReward"


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving("/reward") as made:
        yield made


async def ask(service: Service, num_calls: int = 1, **args: object) -> list[object]:
    """The results of calls that are made one after the other."""
    reward = make(service, **args)
    try:
        return [(await asyncio.gather(reward(answered("2"), answer="2"), return_exceptions=True))[0]
                for _ in range(num_calls)]  # fmt: skip
    finally:
        await reward.close()


def make(service: Service, timeout_s: float = 20.0, max_concurrency: int = 4, **args: object) -> HttpReward:
    context = RewardContext(timeout_s=timeout_s, max_concurrency=max_concurrency)
    wanted = {"url": f"{service.url}/reward", "backoff_s": 0.01, "request_timeout_s": 5.0, **args}
    return HttpReward.build(context, **wanted)


async def test_the_whole_trajectory_is_sent_with_the_key(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", "secret")
    service.plan = [answer({"right": 1, "short": 0.25})]
    reward = make(service, key_variable="REWARD_KEY")
    trajectory = answered("ab", num_sampled=2)
    turns = (Turn("a", "stop", 1, observation="go on"), Turn("b", "stop", 1))
    trajectory.episode = Episode(turns, "done", reward=0.5)
    assert await reward(trajectory, answer="2", options=["x"]) == {"right": 1, "short": 0.25, "reward": 1.25}
    await reward.close()
    assert service.keys == ["Bearer secret"]
    assert service.bodies == [
        {
            "task_id": "t/0",
            "fields": {"answer": "2", "options": ["x"]},
            "prompt": "?",
            "response": "ab",
            "reasoning": "",
            "finish_reason": "stop",
            "num_tokens": 2,
            "turns": [
                {"response": "a", "reasoning": "", "observation": "go on", "finish_reason": "stop", "thread": "main"},
                {"response": "b", "reasoning": "", "observation": "", "finish_reason": "stop", "thread": "main"},
            ],
            "episode_reward": 0.5,
        }
    ]


async def test_failures_that_may_pass_are_tried_again(service: Service) -> None:
    service.plan = [answer("down", 500), hang_up, hang, answer(0.5)]
    assert await ask(service, request_timeout_s=0.3) == [{"reward": 0.5}]
    assert service.num_requests == 4


@pytest.mark.parametrize(
    "after",
    ["1", format_datetime(datetime.now(UTC) + timedelta(days=3650), usegmt=True)],
    ids=["seconds", "date"],
)
async def test_retry_after_is_waited_for_or_too_late(service: Service, after: str) -> None:
    service.plan = [answer("slow down", 429, Retry_After=after), answer(1)]
    started = time.monotonic()
    [result] = await ask(service)
    if after == "1":
        assert result == {"reward": 1.0}
        assert time.monotonic() - started >= 1
    else:
        assert isinstance(result, RewardServiceError)
        assert "HTTP 429" in str(result)
        assert "would be too late" in str(result)
        assert service.num_requests == 1


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (raw("<html>"), "the answer is not JSON"),
        (raw("NaN"), r"the service answered nan; expected a finite number"),
        (answer([1]), r"the service answered \[1\] of type list; expected a number, or a dict of numbers"),
        (answer({"right": "yes"}), r"a dict with right='yes'"),
        (answer({}), "an empty dict"),
        (answer("who?", 401), "HTTP 401"),
        (answer("there", 301, Location="/elsewhere"), "HTTP 301"),
        (raw("x" * (17 << 20)), "longer than 16777216 bytes"),
    ],
)
async def test_what_no_repetition_can_mend_is_not_tried_again(service: Service, handler: Handler, message: str) -> None:
    service.plan = [handler]
    with pytest.raises(RewardServiceError, match=message):
        raise (await ask(service))[0]  # type: ignore[misc]
    assert service.num_requests == 1


async def test_a_service_that_failed_many_requests_still_gets_requests(service: Service) -> None:
    service.plan = [answer("slow down", 429)] * 5 + [answer("down", 500)] * 5 + [answer(1)]
    assert (await ask(service, num_calls=11, max_attempts=1))[10] == {"reward": 1.0}


async def test_no_more_requests_run_at_a_time_than_allowed(service: Service) -> None:
    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(0.02)
        return web.json_response(1)

    service.plan = [slow]
    reward = make(service, max_concurrency=3)
    await asyncio.gather(*(reward(answered("2")) for _ in range(20)))
    await reward.close()
    assert service.most == 3


async def test_a_request_whose_time_is_over_when_its_turn_comes_is_not_sent(service: Service) -> None:
    service.plan = [hang]
    client = JsonClient(RetryConfig(max_attempts=1), max_concurrency=1, headers={})
    url = f"{service.url}/reward"
    try:
        async with asyncio.timeout(5):
            first = asyncio.create_task(client.post(url, 1, timeout_s=0.3))
            await asyncio.sleep(0)
            with pytest.raises(NoAnswerError, match=r"waited for its turn until its 0.1 s were over, with 1 requests"):
                await client.post(url, 2, timeout_s=0.3, total_timeout_s=0.1)
            await asyncio.gather(first, return_exceptions=True)
    finally:
        await client.close()
    assert service.num_requests == 1


async def test_in_its_process_a_failure_is_a_failed_reward_and_never_0(service: Service) -> None:
    service.plan = [answer(0.25), answer("down", 500), hang]
    args = {"url": f"{service.url}/reward", "backoff_s": 0.0, "max_attempts": 2, "request_timeout_s": 0.5}
    runner = RewardRunner(RewardConfig(fn=FN, args=args, timeout_s=5))
    try:
        task, trajectory = pair("2", answer="2")
        assert (await runner.score(task, trajectory)).reward == 0.25
        with pytest.raises(TrajectoryError, match=r"gave no reward: TimeoutError: .*\(try 2 of 2\)") as caught:
            await runner.score(task, trajectory)
        with pytest.raises(TrajectoryError, match=r"cannot be sent to .* as JSON: Object of type set"):
            await runner.score(*pair("2", answer={1, 2}))
    finally:
        await runner.shutdown()
    assert caught.value.kind == "reward"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"url": "localhost"}, "url: String should match pattern"),
        ({"url": "http://x", "key_variable": "NO_SUCH_KEY"}, "key_variable=NO_SUCH_KEY: .* not set here"),
        ({"url": "http://x", "request_timeout_s": 30}, "request_timeout_s=30 with reward.timeout_s=22: a call would"),
        ({"url": "http://x", "retries": 3}, "retries: Extra inputs are not permitted"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(args: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_reward(RewardConfig(fn=FN, args=args, timeout_s=22))


def test_retry_after_is_a_number_or_a_date() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    past = format_datetime(datetime.now(UTC) - timedelta(seconds=60), usegmt=True)
    assert 57 < parse_retry_after(soon) <= 60
    assert [parse_retry_after(text) for text in (None, "7", "soon", past)] == [0, 7, 0, 0]
