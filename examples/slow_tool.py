"""A reward whose tool is sometimes slow, like web searches, compilers and judges.

An async function is called for many trajectories at once; each waits for its own tool only. In this folder:

    penstock train experiment=arithmetic reward.fn=slow_tool:exact_match_after_tool reward.timeout_s=120 name=slow
"""

import asyncio
import math
import random

from penstock.dataflow.trajectory import Trajectory
from penstock.envs.tasks.arithmetic import exact_match

MEAN_S = 1.0
SIGMA = 1.25
CAP_S = 30.0


def tool_latency_s(call_id: str) -> float:
    """Lognormal with a long tail, the same for the same call in every run; seconds."""
    draw = random.Random(call_id).gauss(math.log(MEAN_S) - SIGMA**2 / 2, SIGMA)
    return min(math.exp(draw), CAP_S)


async def exact_match_after_tool(trajectory: Trajectory, answer: str, **_: object) -> float:
    """1 if the answer is right; known only when the tool has answered."""
    await asyncio.sleep(tool_latency_s(trajectory.trajectory_id))
    return exact_match(trajectory, answer)
