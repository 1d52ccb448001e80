r"""An environment whose tool, which checks the policy's answer, is sometimes slow. No engine waits for it.

In this folder:

    penstock train experiment=arithmetic env.factory=slow_environment:CheckedSums reward=episode \
        env.episode.timeout_s=120 name=slow

`solve` is the same as an agent program: env=agent env.args.tasks=arithmetic env.args.agent=slow_environment:solve
"""

import asyncio
from collections import Counter

from slow_tool import tool_latency_s

from penstock.envs.environment import Done, Environment
from penstock.envs.tasks.arithmetic import ArithmeticTasks


class CheckedSums(ArithmeticTasks):
    def environment(self):
        return Check()


attempts = Counter()  # per task: the n-th attempt takes the same time in every run


async def tool(task, claim: str) -> bool:
    attempt = attempts[task.task_id]
    attempts[task.task_id] += 1
    await asyncio.sleep(tool_latency_s(f"{task.task_id}/{attempt}"))
    return claim == task.fields["answer"]


class Check(Environment):
    async def step(self, action):
        is_right = await tool(self.task, action.text.rpartition(";")[2])
        return Done(float(is_right and not action.is_truncated), counts={"tool_calls": 1})


async def solve(task, client):
    answer = (await client.completions.create(model="policy", prompt=task.prompt)).choices[0]
    return float(await tool(task, answer.text.rpartition(";")[2]) and answer.finish_reason == "stop")
