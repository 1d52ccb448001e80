"""qwen-agent: its own format of tool calls in plain text, streamed."""

import os
import sys

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("add")
class Add(BaseTool):
    description = "Add two numbers."
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a"],
    }

    def call(self, params, **kwargs):
        return "42"


served = {"model_server": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
bot = Assistant(llm={"model": "policy", "model_type": "oai", **served}, function_list=["add"])
*_, last = bot.run([{"role": "user", "content": sys.argv[1]}])
print(last[-1]["content"])
