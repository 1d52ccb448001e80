"""Your own agent program, in its own process; docs/guides/openai-endpoint.md goes through it.

In this folder:

    penstock train experiment=text env=agent env.args.tasks=own_agent:Codes 'env.args.agent=[python, own_agent.py]' \\
        reward=episode name=own_agent
"""

import json
import os
from pathlib import Path

from openai import OpenAI

from penstock.envs.tasks.generated_tasks import GeneratedTasks


class Codes(GeneratedTasks):
    def draw(self, rng):
        return {"prompt": f"Say a letter. ({rng.randint(1000, 9999)})", "letters": "".join(rng.sample("abcdefgh", 4))}


def main():
    task = json.loads(Path(os.environ["PENSTOCK_TASK"]).read_text())
    client, reward = OpenAI(), 0.0
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        stream = client.chat.completions.create(model="policy", messages=messages, max_tokens=6, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        reward += sum(said.count(letter) for letter in task["fields"]["letters"]) / 12
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And another."}]
    print(json.dumps({"letters": reward}))


if __name__ == "__main__":
    main()
