"""How sessions of agent programs go wrong: budgets, repeated refusals, broken connections, silence, lost engines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from penstock.dataflow.errors import TrajectoryError
from penstock.envs.endpoint import session
from penstock.envs.environment import EndpointAccess
from penstock.envs.workers.episode_child import EpisodeReply
from tests.agents import ReplyingEngine, chat, check_tokens, client_of, run_agent, run_agents, user
from tests.fakes import FakeEngine

CHANGES: dict[str, Any] = {
    "another first message": lambda first, answer: [user("other"), answer, user("more")],
    "another answer": lambda first, answer: [first, {"role": "assistant", "content": "I said this"}, user("more")],
    "the same again": lambda first, answer: [first],
    "a summary": lambda first, answer: [user("in short: ...")],
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_history_is_refused_if_only_one_is_allowed_and_the_session_goes_on(change: str) -> None:
    async def program(client: AsyncOpenAI) -> None:
        first = user("hello")
        answer = (await chat(client, [first])).choices[0].message
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(client, CHANGES[change](first, answer))
        assert refused.value.code == "history_changed"
        assert str(refused.value.param).startswith("messages")
        await chat(client, [first, answer, user("more")])

    trajectory = await run_agent(program, ReplyingEngine(lambda context: "ok"), threads="strict")
    assert trajectory.episode is not None
    assert len(trajectory.episode.turns) == 2
    assert trajectory.episode.counts["refused"] == 1


@pytest.mark.parametrize("dies", [False, True])
async def test_a_budget_refuses_the_request_and_the_episode_counts_as_cut_off_however_the_program_ends(
    dies: bool,
) -> None:
    async def program(client: AsyncOpenAI) -> EpisodeReply:
        messages = [user("go")]
        for _ in range(3):
            messages += [(await chat(client, messages)).choices[0].message, user("on")]
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(client, messages)
        assert refused.value.code == "max_turns"
        if dies:
            raise TrajectoryError("env", "the agent ended with exit code 1")
        return {"done": True, "reward": 0.25}

    trajectory = await run_agent(program, ReplyingEngine(lambda context: "ok"), max_turns=3)
    assert trajectory.episode is not None
    assert (trajectory.episode.end, trajectory.finish_reason) == ("max_turns", "length")
    assert trajectory.episode.reward == (0.0 if dies else 0.25)
    assert trajectory.episode.counts["requests"] == 4, "the client did not try again"


@pytest.mark.parametrize("is_over", [True, False])
async def test_a_program_that_repeats_a_refused_request_is_ended(is_over: bool) -> None:
    """After its budget with the turns that it has had; otherwise its attempt fails."""
    num_refused = 0

    async def program(client: AsyncOpenAI) -> None:
        nonlocal num_refused
        messages = [user("go")]
        while True:
            try:
                answer = await chat(client, messages)
                messages += [answer.choices[0].message, user("on")]
                if not is_over:
                    messages[0] = user("another history")
            except openai.APIStatusError:
                num_refused += 1
                await asyncio.sleep(0.02)

    async with asyncio.timeout(30):
        engine, max_turns = ReplyingEngine(lambda context: "ok"), 2 if is_over else 9
        run = run_agent(program, engine, max_turns=max_turns, timeout_s=20.0, threads="agent" if is_over else "strict")
        if not is_over:
            with pytest.raises(TrajectoryError, match="has sent a request 3 times that is refused"):
                await run
        else:
            trajectory = await run
            assert trajectory.episode is not None
            assert (len(trajectory.episode.turns), trajectory.episode.end) == (2, "max_turns")
            assert trajectory.episode.reward == 0.0
    assert num_refused in (2, 3)


async def test_a_program_that_insists_on_what_is_not_supported_is_ended_with_the_reason() -> None:
    async def program(client: AsyncOpenAI) -> None:
        for _ in range(100):
            with contextlib.suppress(openai.BadRequestError):
                await chat(client, [user("go")], response_format={"type": "json_object"})
            await asyncio.sleep(0.01)

    async with asyncio.timeout(10):
        with pytest.raises(TrajectoryError, match=r"3 times that is refused: .*response_format"):
            await run_agent(program, ReplyingEngine(lambda context: "ok"), timeout_s=60.0)


async def test_a_program_that_asks_on_after_its_budget_is_ended_when_its_grace_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "GRACE_S", 0.3)

    async def program(client: AsyncOpenAI) -> None:
        for number in range(1000):
            with contextlib.suppress(openai.BadRequestError):
                await chat(client, [user(f"go {number}")])
            await asyncio.sleep(0.02)

    async with asyncio.timeout(10):
        trajectory = await run_agent(program, ReplyingEngine(lambda context: "ok"), max_turns=2, timeout_s=60.0)
    assert trajectory.episode is not None
    assert (len(trajectory.episode.turns), trajectory.episode.end) == (2, "max_turns")


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("limit", ["turn", "episode", "its own"])
async def test_a_program_that_cannot_go_on_after_a_cut_answer_has_not_failed(limit: str, dies: bool) -> None:
    """A limit of ours cut its answer in the middle of a call. A limit that it set itself does not excuse it."""

    async def program(client: AsyncOpenAI) -> None:
        own = {"max_tokens": 3} if limit == "its own" else {}
        answer = await chat(client, [user("go")], **own)
        assert answer.choices[0].finish_reason == "length"
        if dies:
            raise TrajectoryError("env", "the agent ended with exit code 1")

    limits = {"max_new_tokens": 5} if limit == "turn" else {"max_tokens": 70} if limit == "episode" else {}
    run = run_agent(program, ReplyingEngine(lambda context: "a long answer" * 9), **limits)
    if limit == "its own" and dies:
        with pytest.raises(TrajectoryError, match="exit code 1"):
            await run
        return
    trajectory = await run
    assert trajectory.episode is not None
    assert trajectory.finish_reason == "length"
    assert trajectory.episode.reward == (None if limit == "its own" else 0.0)


async def test_a_loop_that_stood_still_takes_no_program_for_silent() -> None:
    async def program(client: AsyncOpenAI) -> None:
        answer = (await chat(client, [user("go")])).choices[0].message
        await asyncio.sleep(0.1)
        time.sleep(1.5)  # noqa: ASYNC251 - the driver stands still, and the program with it
        await chat(client, [user("go"), answer, user("on")])

    trajectory = await run_agent(program, ReplyingEngine(lambda context: "ok"), timeout_s=0.4)
    assert trajectory.episode is not None
    assert len(trajectory.episode.turns) == 2


async def test_a_text_that_has_no_token_is_refused_and_the_session_continues() -> None:
    async def program(client: AsyncOpenAI) -> None:
        first, body = user("hello"), b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}'
        for _ in range(2):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.post("/chat/completions", cast_to=object, content=body)
            assert (refused.value.code, refused.value.param) == ("invalid_value", "messages")
        await chat(client, [first])

    trajectory = await run_agent(program, ReplyingEngine(lambda context: "ok"))
    assert trajectory.episode is not None
    assert (len(trajectory.episode.turns), trajectory.episode.counts["refused"]) == (1, 2)


async def test_a_context_that_is_full_is_refused_with_both_numbers_and_leaves_no_trace() -> None:
    async def program(client: AsyncOpenAI) -> EpisodeReply:
        answer = (await chat(client, [user("go")])).choices[0].message
        with pytest.raises(openai.BadRequestError, match="maximum context length is 200 tokens") as refused:
            await chat(client, [user("go"), answer, user("x" * 500)])
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
        return {"done": True, "reward": 1.0}

    engine = ReplyingEngine(lambda context: "ok")
    trajectory = await run_agent(program, engine, max_tokens=200)
    assert trajectory.episode is not None
    assert (trajectory.episode.end, trajectory.loss_mask[-1]) == ("max_tokens", True)
    check_tokens(engine, trajectory)


async def test_a_request_that_is_repeated_because_its_client_went_away_gets_the_answer_that_was_sampled() -> None:
    engine = ReplyingEngine(lambda context: "only once", may_go_on=asyncio.Event())

    async def program(client: AsyncOpenAI) -> None:
        impatient = client.with_options(max_retries=0, timeout=1.0)
        with pytest.raises(openai.APITimeoutError):
            await chat(impatient, [user("?")])
        assert engine.may_go_on is not None
        engine.may_go_on.set()
        assert (await chat(client, [user("?")])).choices[0].message.content == "only once"

    trajectory = await run_agent(program, engine)
    assert len(engine.served) == 1
    check_tokens(engine, trajectory)


async def test_a_program_that_is_silent_or_sends_no_request_fails_its_attempt_and_its_key_is_deleted() -> None:
    async def hangs(client: AsyncOpenAI) -> None:
        await chat(client, [user("?")])
        await asyncio.sleep(60)

    async def sends_no_request(client: AsyncOpenAI) -> None:
        return

    engine = ReplyingEngine(lambda context: "ok")
    with pytest.raises(TrajectoryError, match=r"t/0: neither a request that could be answered nor an end within 0.3 s"):
        await run_agent(hangs, engine, timeout_s=0.3)
    with pytest.raises(TrajectoryError, match="without a request that could be answered"):
        await run_agent(sends_no_request, engine)


async def test_calls_after_the_end_of_a_session_get_401() -> None:
    accesses: list[EndpointAccess] = []
    has_asked = asyncio.Event()

    async def short(client: AsyncOpenAI) -> None:
        await chat(client, [user("?")])
        accesses.append(EndpointAccess(str(client.base_url), client.api_key, "policy"))
        has_asked.set()

    async def long(client: AsyncOpenAI) -> None:
        await chat(client, [user("?")])
        await has_asked.wait()
        await asyncio.sleep(0.2)
        async with client_of(accesses[0]) as late:
            with pytest.raises(openai.AuthenticationError):
                await chat(late, [user("?"), {"role": "assistant", "content": "ok"}, user("!")])

    await run_agents([short, long], ReplyingEngine(lambda context: "ok"))


async def test_an_engine_that_is_lost_for_good_fails_the_attempt_as_engine_and_the_client_gets_an_error() -> None:
    heard: list[Exception] = []

    async def program(client: AsyncOpenAI) -> None:
        try:
            await chat(client.with_options(max_retries=0), [user("?")])
        except openai.InternalServerError as error:
            heard.append(error)
            raise TrajectoryError("env", "exit code 1") from error

    class Broken(FakeEngine):
        async def generate(self, request: Any) -> Any:
            raise TrajectoryError("engine", "planted")
            yield

    with pytest.raises(TrajectoryError, match="engine: planted"):
        await run_agent(program, Broken())


class FailingOnce(ReplyingEngine):
    """Rejects the first request whose context ends in "bad", after some tokens."""

    has_failed = False

    async def generate(self, request: Any) -> Any:
        fails = not self.has_failed and "bad" in self.codec.tokenizer.decode(request.prompt_token_ids)
        async for delta in super().generate(request):
            if fails and len(self.served[-1][2]) == 2:
                self.has_failed = True
                self.served.pop()
                raise TrajectoryError("engine", "planted", is_final=True)
            yield delta


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("begins_bad", [False, True])
async def test_a_turn_that_no_engine_samples_leaves_no_trace_and_the_program_may_ask_again(
    is_stream: bool, begins_bad: bool
) -> None:
    async def ask(client: AsyncOpenAI, messages: Any) -> str:
        if not is_stream:
            return str((await chat(client, messages)).choices[0].message.content)
        stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def program(client: AsyncOpenAI) -> None:
        plain = client.with_options(max_retries=0)
        messages = [user("bad" if begins_bad else "hello")]
        if not begins_bad:
            messages += [{"role": "assistant", "content": await ask(plain, messages)}, user("bad")]
        with pytest.raises(openai.APIError, match="The turn was not sampled: engine: planted"):
            await ask(plain, messages)
        assert await ask(plain, messages) == "okay"

    engine = FailingOnce(lambda context: "okay")
    trajectory = await run_agent(program, engine, max_turns=1 if begins_bad else 2)
    assert trajectory.episode is not None
    assert (trajectory.episode.end, trajectory.episode.counts["failed_turns"]) == ("done", 1)
    check_tokens(engine, trajectory)


async def test_a_program_that_fails_after_a_turn_that_no_engine_sampled_fails_for_that_reason() -> None:
    async def program(client: AsyncOpenAI) -> None:
        await chat(client, [user("hello")])
        with contextlib.suppress(openai.APIError):
            await chat(client.with_options(max_retries=0), [user("bad")])
        raise TrajectoryError("env", "exit code 1")

    with pytest.raises(TrajectoryError, match="engine: planted") as failed:
        await run_agent(program, FailingOnce(lambda context: "okay"))
    assert failed.value.is_final


@pytest.mark.parametrize("recovers", [False, True])
async def test_a_cut_answer_before_it_does_not_make_the_failure_of_an_engine_a_reward_of_0(recovers: bool) -> None:
    async def program(client: AsyncOpenAI) -> None:
        plain = client.with_options(max_retries=0)
        await chat(plain, [user("hello")])  # cut by the run's limit
        with contextlib.suppress(openai.APIError):
            await chat(plain, [user("bad")])
        if recovers:
            await chat(plain, [user("hi")], max_tokens=1)  # cut by its own
        raise TrajectoryError("env", "exit code 1")

    with pytest.raises(TrajectoryError, match="env: exit code 1" if recovers else "engine: planted"):
        await run_agent(program, FailingOnce(lambda context: "a long answer"), max_new_tokens=3)
