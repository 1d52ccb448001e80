"""A small agent, which knows nothing of the training: the policy gives shell commands, and sees what they print."""

import os
import re
import subprocess
import sys

from openai import OpenAI

SYSTEM = "Give one shell command in a ``` block, and see its output. Give none when you are done."


def main(prompt):
    client = OpenAI()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    for _ in range(20):
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        said = answer.choices[0].message.content or ""
        commands = re.findall(r"```(?:sh|bash)?\n(.*?)```", said, re.DOTALL)
        if not commands:
            break
        done = subprocess.run(["timeout", "60", "sh", "-c", commands[-1]], capture_output=True, text=True, check=False)
        output = f"{(done.stdout + done.stderr)[-2000:]}\nexit code {done.returncode}"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": output}]


if __name__ == "__main__":
    main(sys.argv[1])
