"""Episodes end by the environment or by a budget; what an environment fails at is no reward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import EngineId, TaskId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.environment import Action
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.fakes import FakeEngine

CODEC = TokenCodec(character_tokenizer())
TASK = Task(TaskId("t"), "1+1=", {}, "")
SAMPLING = SamplingParams(8, temperature=0.0, stop_token_ids=(1,))


class Scripted:
    """An environment that says what `script` gives for each turn."""

    def __init__(self, script: Callable[[Action], EpisodeReply]) -> None:
        self.script = script
        self.actions: list[Action] = []
        self.is_open = False

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Any]:
        self.is_open, self.prompt = True, task.prompt
        try:
            yield self
        finally:
            self.is_open = False

    async def reset(self) -> EpisodeReply:
        return {"content": self.prompt, "role": "user"}

    async def step(self, action: Action) -> EpisodeReply:
        self.actions.append(action)
        return self.script(action)


def hint(action: Action) -> EpisodeReply:
    return {"content": "<", "role": "user", "reward": 0.5, "counts": {"hints": 1.0}}


async def play(
    script: Callable[[Action], EpisodeReply],
    *engines: FakeEngine,
    turns: int = 3,
    tokens: int = 100,
    sampling: SamplingParams = SAMPLING,
) -> tuple[Trajectory, Scripted]:
    environment = Scripted(script)
    player = EpisodePlayer(environment.open, CODEC, EpisodeBudget(turns, tokens))
    runner = TrajectoryRunner(EnginePool(engines or [FakeEngine()], 8), CODEC, 5.0, episodes=player)
    trajectory = await asyncio.wait_for(runner.run(RolloutContext(TASK, "0"), 0, sampling), 5)
    assert not environment.is_open
    return trajectory, environment


async def test_an_episode_that_uses_up_its_turns_is_marked_and_ends_on_a_sampled_token() -> None:
    trajectory, environment = await play(hint)
    episode = trajectory.episode
    assert episode is not None
    assert (episode.end, len(episode.turns), trajectory.finish_reason) == ("max_turns", 3, "length")
    assert (episode.reward, episode.counts) == (1.5, {"hints": 3.0})
    assert [action.turn for action in environment.actions] == [0, 1, 2]
    assert trajectory.loss_mask.tolist() == [False] * 4 + [True] * 3 + [False] + [True] * 3 + [False] + [True] * 3
    assert [turn.observation for turn in episode.turns] == ["<", "<", ""]
    assert trajectory.response == "".join(action.text for action in environment.actions)
    assert not trajectory.behavior_logprobs[~trajectory.loss_mask].any()


async def test_an_episode_that_the_environment_ends_on_a_turn_that_was_cut_off_is_truncated() -> None:
    trajectory, environment = await play(
        lambda action: {"done": True, "reward": 1.0} if action.turn else hint(action),
        sampling=replace(SAMPLING, max_new_tokens=2),
    )
    assert [action.is_truncated for action in environment.actions] == [True, True]
    assert trajectory.episode is not None
    assert (trajectory.finish_reason, trajectory.episode.end) == ("length", "done")


async def test_done_ends_it_at_once() -> None:
    trajectory, _ = await play(lambda action: {"done": True, "reward": 2.0} if action.turn else hint(action))
    assert trajectory.episode is not None
    assert (trajectory.finish_reason, trajectory.episode.end, trajectory.episode.reward) == ("stop", "done", 2.5)
    assert len(trajectory.token_ids) == 4 + 3 + 1 + 3


@pytest.mark.parametrize(("tokens", "expected"), [(8, 7), (9, 9), (10, 10), (12, 11)])
async def test_the_token_budget_is_never_exceeded_and_no_observation_is_at_the_end(tokens: int, expected: int) -> None:
    trajectory, environment = await play(hint, tokens=tokens)
    assert trajectory.episode is not None
    assert (trajectory.episode.end, trajectory.finish_reason) == ("max_tokens", "length")
    assert len(trajectory.token_ids) == expected
    assert trajectory.loss_mask[-1]
    assert environment.actions[-1].is_truncated == (trajectory.token_ids[-1] != 1)


async def test_a_prompt_that_leaves_no_space_for_an_answer_fails_with_both_numbers() -> None:
    with pytest.raises(TrajectoryError, match=r"the prompt has 4 tokens, the budget of the episode is 4"):
        await play(hint, tokens=4)


async def test_a_failing_environment_fails_the_attempt_and_holds_no_slot() -> None:
    def fails(action: Action) -> EpisodeReply:
        raise TrajectoryError("env", "planted")

    engine = FakeEngine()
    with pytest.raises(TrajectoryError, match="env: planted"):
        await play(fails, engine)
    assert engine.running == 0


async def test_a_turn_interrupted_in_its_middle_goes_on_elsewhere_and_versions_never_decrease() -> None:
    whole, _ = await play(hint)
    lossy = FakeEngine(EngineId("lossy"), loses_at=lambda serial: 2 if serial == 1 else None)
    resumed, _ = await play(hint, lossy, FakeEngine(EngineId("other"), version=0, length=lambda serial: 1))
    assert resumed.episode is not None
    assert [turn.num_interruptions for turn in resumed.episode.turns] == [0, 1, 0]
    np.testing.assert_array_equal(resumed.token_ids[:10], whole.token_ids[:10])
    np.testing.assert_array_equal(resumed.loss_mask[:10], whole.loss_mask[:10])


async def test_the_next_turn_waits_for_an_engine_that_is_as_new_as_the_last() -> None:
    newer, older = FakeEngine(EngineId("newer"), version=3), FakeEngine(EngineId("older"), version=2)
    pool = EnginePool([newer, older], 8)
    pool.pause(EngineId("older"))

    def only_the_older_is_free(action: Action) -> EpisodeReply:
        pool.resume(EngineId("older"))
        pool.pause(EngineId("newer"))
        asyncio.get_running_loop().call_later(0.05, pool.resume, EngineId("newer"))
        return hint(action)

    player = EpisodePlayer(Scripted(only_the_older_is_free).open, CODEC, EpisodeBudget(3, 100))
    runner = TrajectoryRunner(pool, CODEC, 5.0, episodes=player)
    trajectory = await asyncio.wait_for(runner.run(RolloutContext(TASK, "0"), 0, SAMPLING), 5)
    assert [span.version for span in trajectory.spans] == [3]
    assert older.requests == []


async def test_the_only_slot_is_free_while_an_environment_thinks() -> None:
    """Each of two episodes waits in its environment until the other is there too: with its slot held, forever."""
    both_think = asyncio.Barrier(2)

    class Thoughtful(Scripted):
        async def step(self, action: Action) -> EpisodeReply:
            await both_think.wait()
            return self.script(action)

    player = EpisodePlayer(Thoughtful(hint).open, CODEC, EpisodeBudget(2, 100))
    engine = FakeEngine()
    runner = TrajectoryRunner(EnginePool([engine], 1), CODEC, 5.0, episodes=player)
    async with asyncio.timeout(5):
        played = await asyncio.gather(*(runner.run(RolloutContext(TASK, "0"), member, SAMPLING) for member in range(2)))
    assert [len(one.episode.turns) for one in played if one.episode is not None] == [2, 2]
    assert engine.most_running == 1
