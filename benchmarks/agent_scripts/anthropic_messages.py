"""The official client: Messages with a tool, whole and streamed."""

import sys

from anthropic import Anthropic

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
client, messages = Anthropic(), [{"role": "user", "content": sys.argv[1]}]
for is_stream in (False, True, False):
    asked = {"model": "policy", "max_tokens": 500, "system": "Use the tool.", "messages": messages, "tools": [ADD]}
    if is_stream:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    calls = [block for block in message.content if block.type == "tool_use"]
    messages.append({"role": "assistant", "content": message.content})
    messages.append(
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": one.id, "content": "42"} for one in calls]}
    )
    if not calls:
        print(message.content[0].text)
        break
