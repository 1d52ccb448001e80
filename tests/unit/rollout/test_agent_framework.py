"""An agent of the OpenAI Agents SDK, which knows nothing of this package, becomes a token-exact trajectory."""

from __future__ import annotations

import json

import pytest
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from penstock.envs.workers.episode_child import EpisodeReply
from tests.agents import ReplyingEngine, check_tokens, run_agent

CALL = 'Let me see.\n<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_agent_with_a_tool_is_recorded(is_stream: bool) -> None:
    calls: list[tuple[int, int]] = []

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return a + b

    async def program(client: AsyncOpenAI) -> EpisodeReply:
        model = OpenAIChatCompletionsModel("policy", client)
        agent = Agent(name="calculator", instructions="Use the tool.", model=model, tools=[add])
        config = RunConfig(tracing_disabled=True)
        if is_stream:
            streamed = Runner.run_streamed(agent, "17+25?", run_config=config)
            kinds = {event.type async for event in streamed.stream_events()}
            assert "raw_response_event" in kinds
            said = streamed.final_output
        else:
            said = (await Runner.run(agent, "17+25?", run_config=config)).final_output
        return {"done": True, "reward": float(said == "It is 42.")}

    def reply(context: str) -> str:
        tools = json.loads(context.partition("<tools>\n")[2].partition("\n</tools>")[0])
        assert tools["function"]["name"] == "add"
        return "It is 42." if "<tool_response>\n42\n</tool_response>" in context else CALL

    engine = ReplyingEngine(reply)
    trajectory = await run_agent(program, engine, timeout_s=30.0)
    check_tokens(engine, trajectory)
    assert calls == [(17, 25)]
    assert trajectory.episode is not None
    assert [turn.response for turn in trajectory.episode.turns] == [CALL, "It is 42."]
    assert (trajectory.episode.reward, trajectory.episode.end) == (1.0, "done")
    assert "refused" not in trajectory.episode.counts
