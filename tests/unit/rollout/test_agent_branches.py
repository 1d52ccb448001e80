"""Agent programs whose histories branch: replayed requests of real programs, and each kind of branch by itself."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.workers.episode_child import EpisodeReply
from tests.agents import ReplyingEngine, chat, run_agent, user

REQUESTS = Path(__file__).parents[2] / "data" / "agents"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def said(trajectory: Trajectory) -> list[list[str]]:
    """The turns of each trained thread, in order."""
    assert trajectory.episode is not None
    by_thread: dict[str, list[str]] = defaultdict(list)
    for turn in trajectory.episode.turns:
        by_thread[turn.thread].append(turn.response)
    return list(by_thread.values())


def side(trajectory: Trajectory) -> list[str]:
    assert trajectory.episode is not None
    return [turn.response for turn in trajectory.episode.side_turns]


def with_loss(trajectory: Trajectory, engine: ReplyingEngine) -> list[str]:
    """Text of all tokens with loss, thread by thread."""
    return [engine.codec.decode(part.token_ids[part.loss_mask]) for part in trajectory.split_threads()]


@pytest.mark.parametrize(
    ("program", "num_threads", "num_turns", "num_side"),
    [("mini-swe-agent", 3, 3, 0), ("opencode", 1, 3, 1), ("qwen-code", 2, 3, 0), ("smolagents", 3, 3, 0)],
)
async def test_what_real_programs_send_is_answered(
    program: str, num_threads: int, num_turns: int, num_side: int
) -> None:
    """tests/data/agents: their requests, texts replaced by placeholders, and the answers that they were given."""
    recorded = json.loads((REQUESTS / f"{program}.json").read_text())
    answers = {name: iter(texts) for name, texts in recorded["policy_answers"].items()}
    conversation = ""

    async def play(client: AsyncOpenAI) -> EpisodeReply:
        nonlocal conversation
        async with httpx.AsyncClient(trust_env=False) as http:
            for request in recorded["requests"]:
                conversation = str(request["conversation"])
                url = f"{str(client.base_url).rstrip('/')}/chat/completions"
                headers = {"Authorization": f"Bearer {client.api_key}"}
                answer = await http.post(url, json=request["body"], headers=headers)
                assert answer.status_code == 200, answer.text
        return {"done": True, "reward": 1.0}

    engine = ReplyingEngine(lambda context: next(answers[conversation], "?"))
    trajectory = await run_agent(play, engine, max_tokens=100_000, max_new_tokens=2000)
    assert len(trajectory.split_threads()) == num_threads
    assert (sum(map(len, said(trajectory))), len(side(trajectory))) == (num_turns, num_side)
    assert trajectory.num_sampled_tokens == int(trajectory.loss_mask.sum())


async def test_a_compaction_begins_a_thread_and_the_summary_is_not_trained() -> None:
    answers = iter(["one", "two", "a summary", "three"])

    async def program(client: AsyncOpenAI) -> None:
        first = (await chat(client, [user("go")], tools=[ADD])).choices[0].message
        history = [user("go"), first, user("on")]
        second = (await chat(client, history, tools=[ADD])).choices[0].message
        short = (await chat(client, [*history, second, user("Summarise.")])).choices[0].message
        await chat(client, [user(f"So far: {short.content}")], tools=[ADD])

    engine = ReplyingEngine(lambda context: next(answers))
    trajectory = await run_agent(program, engine)
    assert said(trajectory) == [["one", "two"], ["three"]]
    assert side(trajectory) == ["a summary"]
    assert with_loss(trajectory, engine) == ["onetwo", "three"]
    assert trajectory.episode is not None
    assert trajectory.episode.counts["untrained_tokens"] == len("a summary") + 1
    assert "refused" not in trajectory.episode.counts


async def test_parallel_sub_agents_with_equal_prompts_are_threads_of_their_own() -> None:
    numbers = iter(range(100))

    async def program(client: AsyncOpenAI) -> None:
        await asyncio.gather(*(chat(client, [user("look")]) for _ in range(3)))

    engine = ReplyingEngine(lambda context: f"found {next(numbers)}")
    trajectory = await run_agent(program, engine)
    assert sorted(said(trajectory)) == [["found 0"], ["found 1"], ["found 2"]]
    assert len({thread.name for thread in trajectory.threads}) == 3


async def test_a_retry_of_a_turn_is_a_new_sample_after_the_same_tokens() -> None:
    answers = iter(["one", "two", "again", "three"])

    async def program(client: AsyncOpenAI) -> None:
        first = (await chat(client, [user("go")])).choices[0].message
        history = [user("go"), first, user("on")]
        await chat(client, history)
        again = (await chat(client, history)).choices[0].message
        await chat(client, [*history, again, user("on")])

    engine = ReplyingEngine(lambda context: next(answers))
    trajectory = await run_agent(program, engine)
    assert said(trajectory) == [["one", "two"], ["again", "three"]]
    assert with_loss(trajectory, engine) == ["onetwo", "againthree"]
    main, fork = trajectory.split_threads()
    assert fork.threads[0].fork_of == "main"
    start = len(engine.served[1][1])
    assert fork.token_ids[:start].tolist() == main.token_ids[:start].tolist() == list(engine.served[1][1])


async def test_what_led_to_the_end_is_one_sequence_without_the_turns_that_were_given_up() -> None:
    answers = iter(["title", "one", "two", "again", "three", "memory"])

    async def program(client: AsyncOpenAI) -> None:
        await chat(client, [user("A title, please")])
        first = (await chat(client, [user("go")], tools=[ADD])).choices[0].message
        history = [user("go"), first, user("on")]
        await chat(client, history, tools=[ADD])
        again = (await chat(client, history, tools=[ADD])).choices[0].message
        await chat(client, [*history, again, user("on")], tools=[ADD])
        await chat(client, [user("What is worth keeping?")])

    engine = ReplyingEngine(lambda context: next(answers))
    trajectory = await run_agent(program, engine, threads="last")
    assert trajectory.threads == ()
    assert said(trajectory) == [["one", "again", "three"]]
    assert with_loss(trajectory, engine) == ["oneagainthree"]
    assert side(trajectory) == ["title", "two", "memory"]
    assert trajectory.response == "oneagainthree"
    assert trajectory.episode is not None
    lengths = [turn.num_tokens + turn.num_observation_tokens for turn in trajectory.episode.turns]
    first = trajectory.loss_mask.tolist().index(True)
    assert first + sum(lengths) == len(trajectory.token_ids), "each observation is the one that followed on this path"


async def test_a_refusal_is_not_forgotten_when_an_older_turn_ends() -> None:
    is_asked = asyncio.Event()

    def reply(context: str) -> str:
        is_asked.set()
        return "ok"

    engine = ReplyingEngine(reply, may_go_on=asyncio.Event())

    async def program(client: AsyncOpenAI) -> None:
        last = asyncio.create_task(chat(client, [user("go")]))
        await is_asked.wait()
        with pytest.raises(BadRequestError, match=r"has had its 1 answers"):
            await chat(client, [user("something else")])
        assert engine.may_go_on is not None
        engine.may_go_on.set()
        await last
        raise TrajectoryError("env", "the agent ended with exit code 1")

    trajectory = await run_agent(program, engine, max_turns=1)
    assert trajectory.episode is not None
    assert (trajectory.episode.end, trajectory.episode.reward) == ("max_turns", 0.0)


async def test_many_requests_at_once_end_no_program() -> None:
    async def program(client: AsyncOpenAI) -> EpisodeReply:
        asked = [chat(client.with_options(max_retries=0), [user(f"go {number}")]) for number in range(80)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(not isinstance(one, Exception) for one in answers) >= 64
        return {"done": True, "reward": 1.0}

    trajectory = await run_agent(program, ReplyingEngine(lambda context: "ok"), max_turns=100)
    assert len(trajectory.threads) >= 64


async def test_calls_that_a_program_spells_in_its_own_way_are_the_same_calls() -> None:
    """qwen-agent reads calls from the text itself, and renders them again."""
    answers = iter(['<tool_call>{"name":"add","arguments":{"b":1,"a":2}}</tool_call>', "done"])

    async def program(client: AsyncOpenAI) -> None:
        await chat(client, [user("go")])
        respelled = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 1}}\n</tool_call>'
        await chat(client, [user("go"), {"role": "assistant", "content": respelled}, user("3")])

    trajectory = await run_agent(program, ReplyingEngine(lambda context: next(answers)))
    assert len(said(trajectory)) == 1
    assert len(said(trajectory)[0]) == 2


@pytest.mark.parametrize("threads", ["agent", "all"])
async def test_a_title_does_not_use_up_the_turns_of_the_agent(threads: Any) -> None:
    async def program(client: AsyncOpenAI) -> EpisodeReply:
        messages: list[Any] = [user("go")]
        for number in range(3):
            await chat(client, [user(f"A title for {number}")])
            messages += [(await chat(client, messages, tools=[ADD])).choices[0].message, user("on")]
        return {"done": True, "reward": 1.0}

    trajectory = await run_agent(program, ReplyingEngine(lambda context: "ok"), max_turns=3, threads=threads)
    assert trajectory.episode is not None
    assert (trajectory.episode.end, len(trajectory.episode.side_turns)) == ("done", 3 if threads == "agent" else 0)
    assert len(trajectory.episode.turns) == (3 if threads == "agent" else 6)


async def test_an_agent_that_compacts_when_its_context_is_full_is_not_cut_off() -> None:
    async def program(client: AsyncOpenAI) -> EpisodeReply:
        first = (await chat(client, [user("go")])).choices[0].message
        with pytest.raises(Exception, match="maximum context length"):
            await chat(client, [user("go"), first, user("x" * 500)])
        await chat(client, [user("in short")])
        return {"done": True, "reward": 1.0}

    trajectory = await run_agent(program, ReplyingEngine(lambda context: "ok"), max_tokens=200)
    assert trajectory.episode is not None
    assert (trajectory.episode.end, trajectory.finish_reason, trajectory.episode.reward) == ("done", "stop", 1.0)
