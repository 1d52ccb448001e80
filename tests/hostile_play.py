"""Commits every hostile act at every entry point, and collects the records: for tests and benchmarks/hostile.py.

The entry points are those of a run: the reward worker, and the process that plays episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig, EpisodeConfig, IsolationConfig, RewardConfig
from penstock.envs.environment import Action
from penstock.envs.sandbox.hostile import Trap, survives
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.envs.workers.process_tree import descendants
from penstock.envs.workers.scoring import RewardRunner
from tests.answers import pair
from tests.hostile_acts import ACTS, FINE, HostileAct
from tests.hostile_reaches import REACHES, is_possible

STRICT = IsolationConfig()
REWARDS = RewardConfig(
    fn="tests.hostile_acts:reward",
    timeout_s=5.0,
    max_memory_gib=0.25,
    max_processes=24,
    max_attempts=2,
    isolation=STRICT,
)
EPISODES = EpisodeConfig(timeout_s=6.0, max_memory_gib=0.25, max_processes=24, isolation=STRICT)
_SETTLE_S = 20.0
_HUNG = re.compile(r"timed out after|took longer than")


@dataclass(frozen=True, slots=True)
class Played:
    """The result of one act in an episode.

    Attributes:
        record: Kind and detail of the failure; or the text that the model gets; or empty if the step did no harm.
        after: Reward of the next episode.
        leaves_process: Whether a process outlived it.
    """

    record: str
    after: float
    leaves_process: bool


async def play_steps_and_tools(
    trap: Trap, outside: dict[str, Any], num_lanes: int = 5, episodes: EpisodeConfig = EPISODES
) -> dict[tuple[str, str], Played]:
    """By entry_point (`step`, `tool`) and act. Each lane has one episode host, which has to survive all of its acts."""
    acts = [act for act in ACTS if is_possible(act.name) and (episodes.isolation or act.name not in REACHES)]
    todo = [
        (entry_point, act)
        for act in acts
        for entry_point in ("step", "tool")
        if entry_point == "step" or act.tool is not None
    ]
    played: dict[tuple[str, str], Played] = {}

    async def play_lane() -> None:
        host = EpisodeHost(EnvConfig(factory="tests.hostile_acts:Tasks", episode=episodes), 0)
        try:
            while todo:
                entry_point, act = todo.pop(0)
                # Lanes run concurrently, so each act marks its survivors with a different sleep time.
                own = replace(trap, nap_s=f"{trap.nap_s}{len(todo):02d}")
                played[entry_point, act.name] = await _play(host, entry_point, act, own, outside)
            await _settle(host)
        finally:
            await host.close()

    await asyncio.gather(*(play_lane() for _ in range(num_lanes)))
    return played


async def _play(host: EpisodeHost, entry_point: str, act: HostileAct, trap: Trap, outside: dict[str, Any]) -> Played:
    text = act.name if entry_point == "step" else f'<tool_call>{{"name": "act", "arguments": {{"what": "{act.name}"}}}}'
    try:
        record = _text_of(await _step(host, text, trap, outside))
    except TrajectoryError as failure:
        record = f"{failure.kind}: {failure.detail}"
    if _HUNG.search(record):
        await _retired(host)
    after = (await _step(host, FINE, trap, outside))["reward"]
    return Played(record, after, await _outlives(trap))


async def _step(host: EpisodeHost, text: str, trap: Trap, outside: dict[str, Any]) -> EpisodeReply:
    async with host.open(Task(TaskId("t/0"), "?", {"nap": trap.nap_s, "host": outside}, "")) as episode:
        await episode.reset()
        return await episode.step(Action(text))


def _text_of(reply: EpisodeReply) -> str:
    content = reply.get("content", "")
    return content if isinstance(content, str) else content[0]["content"]


async def _retired(host: EpisodeHost) -> None:
    """Wait until the process of a hang has been killed, so that this does not affect the next episode.

    Raises:
        TimeoutError: If it stays alive.
    """
    async with asyncio.timeout(_SETTLE_S):
        while host.pids:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _outlives(trap: Trap) -> bool:
    """Whether a daemon outlives the act. The process of a hang is killed if its episode does not close in time."""
    return await survives(trap) and await survives(trap)


async def _settle(host: EpisodeHost) -> None:
    """Wait until the host has at most one process, whose only descendants are its sandbox and the episode process.

    Raises:
        TimeoutError: If it still has more.
    """
    async with asyncio.timeout(_SETTLE_S):
        while len(host.pids) > 1 or any(len(descendants(pid)) > 3 for pid in host.pids):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def score_rewards(trap: Trap, outside: dict[str, Any], acts: Sequence[HostileAct] = ACTS) -> dict[str, str]:
    """The record of each act in a reward; empty if it does no harm."""
    runner = RewardRunner(REWARDS)
    records: dict[str, str] = {}
    try:
        for act in acts:
            (result,) = await runner.score_many([pair(act.name, nap=trap.nap_s, host=outside)])
            records[act.name] = result.detail if isinstance(result, TrajectoryError) else ""
    finally:
        await runner.shutdown()
    return records


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """Raise `AssertionError` if this process has new descendants afterwards."""
    before = set(descendants(os.getpid()))
    yield
    left = set(descendants(os.getpid())) - before
    assert not left, f"{len(left)} processes are left"
