"""A judge behind the OpenAI chat API, played by a real server: planned answers, and our own endpoint."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import EndpointConfig, RewardConfig
from penstock.envs.contract import RewardContext
from penstock.envs.loading import load_reward
from penstock.envs.rewards.http_reward import RewardServiceError
from penstock.envs.rewards.judge import JudgeReward
from tests.agents import scripted_session
from tests.answers import answered
from tests.unit.envs.http_service import Handler, Service, answer, raw, serving

TEMPLATE = "Judge {response} to {prompt} knowing {answer}; {{}} is a brace."


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving("/v1/chat/completions") as made:
        yield made


def says(text: str | None, finish_reason: str = "stop") -> Handler:
    message = {"role": "assistant", "content": text}
    return answer({"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]})


def make(url: str, max_concurrency: int = 4, **args: object) -> JudgeReward:
    wanted = {"url": url, "model": "m", "template": TEMPLATE, "backoff_s": 0.01, **args}
    return JudgeReward.build(RewardContext(timeout_s=30, max_concurrency=max_concurrency), **wanted)


async def judged(service: Service, *responses: str, **args: object) -> list[object]:
    """All at the same time."""
    reward = make(f"{service.url}/v1/", **args)
    try:
        calls = [reward(answered(response), answer="2") for response in responses or ["1"]]
        return list(await asyncio.gather(*calls, return_exceptions=True))
    finally:
        await reward.close()


@pytest.mark.parametrize(
    ("text", "args", "score", "reward"),
    [
        ("Fine.\nScore: 7", {}, 7, 0.7),
        ("A Score: 3 would be harsh. score: 10.0", {}, 10, 1),
        ("Score: 10 would be too much.\n\n**Score:** 7", {}, 7, 0.7),
        ("Score: **7.5**/10", {}, 7.5, 0.75),
        ("SCORE : 7", {}, 7, 0.7),
        ("**Score**: `7`", {}, 7, 0.7),
        ("<think>Score: 3</think> Score: 8", {}, 8, 0.8),
        ('<think>{"score": 3}</think> {"score": 8}', {"pattern": None, "json_key": "score"}, 8, 0.8),
        ("<4>", {"pattern": r"<(\d)>", "lowest": 1, "highest": 5}, 4, 0.75),
        ('Well: {"why": "{short}", "score": -1} ok', {"pattern": None, "json_key": "score", "lowest": -1}, -1, 0),
    ],
)
async def test_a_score_is_found_and_becomes_a_reward_between_0_and_1(
    service: Service, text: str, args: dict[str, object], score: float, reward: float
) -> None:
    service.plan = [says(text)]
    found = await judged(service, request={"temperature": 0}, **args)
    assert found == [{"reward": pytest.approx(reward), "score": score, "unscored_answers": 0}]
    question = {"role": "user", "content": "Judge 1 to ? knowing 2; {} is a brace."}
    assert service.bodies == [{"temperature": 0, "model": "m", "messages": [question]}]


@pytest.mark.parametrize(
    ("handler", "args", "problem"),
    [
        (says("I like it"), {}, "nothing in it matches"),
        (says("<think>Score: 3</think> 8"), {}, "nothing in it matches"),
        (says("Score: 11"), {}, "11 is outside 0..10"),
        (says("Score: 1", "length"), {}, "cut off at its limit"),
        (says(None), {}, "it is empty"),
        (says("{no}"), {"pattern": None, "json_key": "score"}, "no JSON object with 'score'"),
        (says('{"score": "high"}'), {"pattern": None, "json_key": "score"}, "'high' is not a number"),
        (says('{"score": NaN}'), {"pattern": None, "json_key": "score"}, "nan is outside 0..10"),
    ],
)
async def test_a_question_without_a_score_is_sent_again_then_fails_and_is_never_0(
    service: Service, handler: Handler, args: dict[str, object], problem: str
) -> None:
    service.plan = [handler]
    [failure] = await judged(service, **args)
    assert isinstance(failure, RewardServiceError)
    assert problem in str(failure)
    assert "gave no score in 2 answers" in str(failure)
    assert [problem in body["messages"][0]["content"] for body in service.bodies] == [False, True]
    good = says('{"score": 5}') if args else says("Score: 5")
    service.plan = [handler, good]
    assert await judged(service, **args) == [{"reward": 0.5, "score": 5, "unscored_answers": 1}]


@pytest.mark.parametrize("body", [answer({"error": "x"}), answer([]), answer({"choices": []}), raw("<html>")])
async def test_a_server_of_another_kind_is_an_error(service: Service, body: Handler) -> None:
    service.plan = [body]
    [failure] = await judged(service)
    assert isinstance(failure, RewardServiceError)
    assert service.num_requests == 1


async def test_equal_questions_are_sent_once_and_failures_are_not_cached(service: Service) -> None:
    service.plan = [says("?"), says("Score: 1"), says("Score: 2"), says("Score: 3")]
    reward = make(f"{service.url}/v1", max_questions=1, cache_entries=1)
    with pytest.raises(RewardServiceError):
        await reward(answered("a"), answer="2")
    first = await asyncio.gather(*(reward(answered("a"), answer="2") for _ in range(5)))
    assert [one["score"] for one in first] == [1] * 5
    scores = [(await reward(answered(text), answer="2"))["score"] for text in ("a", "b", "b", "a")]
    assert scores == [1, 2, 2, 3]
    await reward.close()


async def test_requests_keep_to_the_rate(service: Service) -> None:
    service.plan = [says("Score: 1")]
    started = time.monotonic()
    await judged(service, *"abcde", max_requests_per_s=10)
    assert time.monotonic() - started >= 0.4
    assert service.num_requests == 5


async def test_our_own_endpoint_can_be_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_session("Score: 9", EndpointConfig()) as opened:
        monkeypatch.setenv("JUDGE_KEY", opened.access.api_key)
        request = {"temperature": 0, "max_tokens": 16}
        url, model = opened.access.base_url, opened.access.model
        reward = make(url, model=model, key_variable="JUDGE_KEY", request=request)
        assert (await reward(answered("1"), answer="2"))["reward"] == 0.9
        await reward.close()


async def test_a_field_that_a_task_lacks_is_an_error_before_the_start_and_at_the_call(service: Service) -> None:
    with pytest.raises(TypeError, match=r"missing a required.*'answer'"):
        inspect.signature(make("http://x")).bind(None, question="?")
    with pytest.raises(
        RewardServiceError, match=r"does not fit t/0 with the fields \['question'\]: KeyError\('answer'"
    ):
        await make("http://x")(answered("1"), question="?")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"template": "Judge!"}, r"template: .* has no \{response\}"),
        ({"template": 'Say {"score": 1} of {response}'}, r"\{\"score\"\} is not the name of a field"),
        ({"template": "{response"}, "template: "),
        ({"pattern": "("}, "pattern: .* not a regular expression"),
        ({"pattern": r"\d"}, "it has 0 groups, expected 1"),
        ({"json_key": "score"}, "by pattern or by json_key: set one"),
        ({"lowest": 10}, "lowest=10 must be below highest=10"),
        ({"max_requests_per_s": 0.1}, "the last of them would be sent after 2560 s, reward.timeout_s=30"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(args: dict[str, object], message: str) -> None:
    wanted = {"url": "http://x", "model": "m", "template": TEMPLATE, **args}
    with pytest.raises(ConfigError, match=message):
        load_reward(RewardConfig(fn="penstock.envs.rewards.judge:JudgeReward", args=wanted, timeout_s=30))


async def test_the_prompt_of_a_chat_is_shown_without_special_tokens_of_the_policys_template(service: Service) -> None:
    service.plan = [says("Score: 7")]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    asked = replace(answered("2"), prompt="<|im_start|>system\nBe brief.<|im_end|>…", messages=messages)
    reward = make(f"{service.url}/v1/")
    try:
        await reward(asked, answer="2")
    finally:
        await reward.close()
    shown = service.bodies[0]["messages"][0]["content"]
    assert shown == "Judge 2 to system\nBe brief.\nuser\n1+1? knowing 2; {} is a brace."
