"""smolagents: an agent that writes code, or one that calls tools (which always asks for tool_choice=required)."""

import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


model = OpenAIModel(model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = {"code": CodeAgent, "tools": ToolCallingAgent}[sys.argv[2]]
print(kind(tools=[add], model=model, max_steps=5).run(sys.argv[1]))
