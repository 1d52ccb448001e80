"""The OpenAI Agents SDK: a tool, and a hand-off to an agent with another; over Responses (its default) or chat."""

import asyncio
import sys

import agents
from agents import Agent, Runner, function_tool

agents.set_tracing_disabled(True)
agents.set_default_openai_api(sys.argv[2])


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


calculator = Agent(name="calculator", instructions="Use the tool.", model="policy", tools=[add])
front = Agent(name="front", instructions="Hand over.", model="policy", handoffs=[calculator])


async def main():
    print((await Runner.run(calculator, sys.argv[1])).final_output)
    streamed = Runner.run_streamed(calculator, sys.argv[1] + " Again.")
    async for _ in streamed.stream_events():
        pass
    print(streamed.final_output)
    print((await Runner.run(front, sys.argv[1])).final_output)


asyncio.run(main())
