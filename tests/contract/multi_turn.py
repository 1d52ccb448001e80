"""The contract of every engine for episodes of several turns: its logprobs equal those of one forward pass over all.

It runs on each real engine in addition to `EngineContract`, with the shipped player, runner and pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from penstock.dataflow.ids import TaskId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.versions import versions_per_token
from penstock.envs.environment import Action, EndpointAccess
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner

from .engine_harness import Harness, within

CODEC = TokenCodec(character_tokenizer())
NUM_CONVERSATIONS, NUM_TURNS = 12, 4
SAMPLING = SamplingParams(40, temperature=1.0, stop_token_ids=CODEC.stop_token_ids)
PROMPT = "12+34=?; 56-7*(8+9)=?; "
"""Three of it in each turn: with the answers, longer than a block of any prefix cache, and even with four longest
answers below the budget; a conversation that ended early would keep the others waiting."""


class Together:
    """Conversations that take their turns in lockstep: after each turn of all, `between(turn)` runs."""

    def __init__(self, between: Callable[[int], Awaitable[object]]) -> None:
        self._barrier = asyncio.Barrier(NUM_CONVERSATIONS)
        self._between = between

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Together.Played]:
        yield Together.Played(self, task)

    class Played:
        def __init__(self, owner: Together, task: Task) -> None:
            self._owner = owner
            self._task = task

        async def reset(self) -> EpisodeReply:
            return {"content": str(self._task.prompt), "role": "user"}

        async def step(self, action: Action) -> EpisodeReply:
            if await self._owner._barrier.wait() == 0:
                await self._owner._between(action.turn)
            await self._owner._barrier.wait()
            return {"content": f"\n#{len(action.text)}, {self._task.prompt}", "role": "user", "reward": 0.0}

        async def run(self, access: EndpointAccess) -> EpisodeReply:
            raise AssertionError("it does not run itself")

        async def cut_off(self) -> EpisodeReply:
            raise AssertionError("it does not run itself")


@pytest.mark.usefixtures("idle")
class MultiTurnContract:
    """Subclasses name the loop scope of their `harness` fixture with a module-level `pytestmark`."""

    async def test_over_several_turns_logprobs_are_those_of_one_forward_pass(self, harness: Harness) -> None:
        """New weights are published between two turns, which makes the prefix cache of earlier turns stale."""
        first = harness.engine.version

        async def between(turn: int) -> None:
            if turn == 1:
                await harness.publish()

        player = EpisodePlayer(Together(between).open, CODEC, EpisodeBudget(NUM_TURNS, 500))
        runner = TrajectoryRunner(EnginePool([harness.engine], NUM_CONVERSATIONS), CODEC, 60.0, episodes=player)
        runs = [
            runner.run(RolloutContext(Task(TaskId(f"t{i}"), PROMPT * 3 + str(i), environment=""), "turns"), i, SAMPLING)
            for i in range(NUM_CONVERSATIONS)
        ]
        for trajectory in await within(asyncio.gather(*runs)):
            assert trajectory.episode is not None
            assert len(trajectory.episode.turns) == NUM_TURNS
            assert [span.version for span in trajectory.spans] == [first, first + 1]
            ids, sampled = trajectory.token_ids.tolist(), np.flatnonzero(trajectory.loss_mask)
            assert sampled[-1] - sampled[0] > 128 + SAMPLING.max_new_tokens
            writers = versions_per_token(trajectory.spans)
            expected = np.zeros(len(ids), np.float32)
            for version in (first, first + 1):
                mine, seed = sampled[writers == version], harness.seed_of_version[version]
                expected[mine] = harness.reference.logprobs(seed, ids[:1], ids[1:])[mine - 1]
            np.testing.assert_allclose(trajectory.behavior_logprobs, expected, atol=1e-4)
            pretended = harness.reference.logprobs(harness.seed_of_version[first], ids[:1], ids[1:])[sampled - 1]
            assert np.abs(pretended - expected[sampled]).max() > 0.1, "the oracle must tell versions apart"
