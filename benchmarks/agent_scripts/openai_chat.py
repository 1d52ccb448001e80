"""The official client: chat with a tool, whole and streamed."""

import sys

from openai import OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}

client, messages = OpenAI(), [{"role": "user", "content": sys.argv[1]}]
for is_stream in (False, True, False):
    asked = {"model": "policy", "messages": messages, "tools": [ADD]}
    if is_stream:
        with client.chat.completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": one.id, "content": "42"} for one in message.tool_calls or []]
    if not message.tool_calls:
        print(message.content)
