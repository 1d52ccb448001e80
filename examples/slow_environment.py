r"""An environment whose tool, which checks the policy's answer, is sometimes slow. No engine waits for it.

In this folder:

    penstock train experiment=arithmetic env.factory=slow_environment:CheckedSums reward=episode \
        env.episode.timeout_s=120 name=slow
"""

import asyncio
from collections import Counter
from typing import ClassVar

from slow_tool import tool_latency_s

from penstock.envs.environment import Done, Environment
from penstock.envs.tasks.arithmetic import ArithmeticTasks


class CheckedSums(ArithmeticTasks):
    def environment(self):
        return Check()


class Check(Environment):
    calls: ClassVar = Counter()  # attempts per task: the n-th attempt takes the same time in every run

    async def tool(self, claim: str) -> bool:
        attempt = self.calls[self.task.task_id]
        self.calls[self.task.task_id] += 1
        await asyncio.sleep(tool_latency_s(f"{self.task.task_id}/{attempt}"))
        return claim == self.task.fields["answer"]

    async def step(self, action):
        is_right = await self.tool(action.text.rpartition(";")[2])
        return Done(float(is_right and not action.is_truncated), counts={"tool_calls": 1})
