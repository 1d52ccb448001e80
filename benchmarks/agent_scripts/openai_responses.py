"""The official client: Responses with a tool, whole and streamed, by the whole input and by previous_response_id."""

import sys

from openai import OpenAI

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}
client = OpenAI()
for uses_id in (False, True):
    items, new, last = [], [{"role": "user", "content": sys.argv[1]}], None
    for is_stream in (False, True, False):
        items += new
        asked = {"model": "policy", "instructions": "Use the tool.", "tools": [ADD]}
        asked |= {"input": new, "previous_response_id": last} if uses_id and last else {"input": items}
        if is_stream:
            with client.responses.stream(**asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**asked)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        new = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
        last = response.id
        if not calls:
            print(response.output_text)
