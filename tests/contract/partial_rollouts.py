"""What partial rollouts need of every engine: a request for (prompt, sampled so far) continues as if never interrupted.

Runs on each real engine, in addition to `EngineContract`, with the runner and the pool that ship.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from penstock.dataflow.ids import TaskId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engines.local_engine import LocalEngine
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner

from .engine_harness import Harness, within

CODEC = TokenCodec(character_tokenizer())
GREEDY = SamplingParams(200, temperature=0.0)
PROMPTS = ("12+34=", "7*(8+9)=", "0", "99-1=?", "1+1=2;2+2=", "#")


class AbortsOnce:
    """An engine whose first request of each trajectory is aborted after its first deltas, as a preemption would."""

    def __init__(self, engine: LocalEngine, after_deltas: int = 2) -> None:
        self.engine_id = engine.engine_id
        self.requests: list[GenerateRequest] = []
        self._engine = engine
        self._after_deltas = after_deltas
        self._is_spared: set[str] = set()

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        self.requests.append(request)
        trajectory = request.request_id.partition("#")[0]
        num_deltas = 0
        async for delta in self._engine.generate(request):
            yield delta
            num_deltas += 1
            if trajectory not in self._is_spared and num_deltas == self._after_deltas:
                self._is_spared.add(trajectory)
                await self._engine.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)  # type: ignore[arg-type]

    async def load(self) -> EngineLoad:
        return await self._engine.load()


async def answers(
    engine: LocalEngine | AbortsOnce, sampling: SamplingParams, name: str
) -> tuple[TrajectoryRunner, list[Trajectory]]:
    runner = TrajectoryRunner(EnginePool([engine], 32), CODEC, 60.0)
    runs = [
        runner.run(RolloutContext(Task(TaskId(f"t{index}"), prompt), name), index, sampling)
        for index, prompt in enumerate(PROMPTS)
    ]
    return runner, list(await within(asyncio.gather(*runs)))


@pytest.mark.usefixtures("idle")
class PartialRolloutContract:
    """Subclasses name the loop scope of their `harness` fixture with a module-level `pytestmark`."""

    async def test_greedy_interrupted_and_resumed_equals_uninterrupted_token_for_token(self, harness: Harness) -> None:
        _, whole = await answers(harness.engine, GREEDY, "whole")
        engine = AbortsOnce(harness.engine)
        runner, resumed = await answers(engine, GREEDY, "resumed")
        assert runner.stats.interruptions == {"aborted": len(PROMPTS)}
        assert runner.stats.trajectories == len(PROMPTS)
        assert runner.stats.tokens > 0
        for left, right in zip(whole, resumed, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()
            assert (left.spans, left.finish_reason) == (right.spans, right.finish_reason)
            np.testing.assert_allclose(left.behavior_logprobs, right.behavior_logprobs, atol=1e-4)

    async def test_a_trajectory_resumed_under_newer_weights_records_which_version_sampled_which_tokens(
        self, harness: Harness
    ) -> None:
        engine = AbortsOnce(harness.engine)
        first = harness.engine.version
        task, sampling = Task(TaskId("t"), "12+34="), SamplingParams(120, temperature=1.0)
        runner = TrajectoryRunner(EnginePool([engine], 32), CODEC, 60.0)
        runner.pool.set_limit(engine.engine_id, 1)
        running = asyncio.create_task(runner.run(RolloutContext(task, "new"), 0, sampling))
        other = asyncio.create_task(self._publish_when_interrupted(harness, runner))
        trajectory = await within(running)
        await within(other)
        assert trajectory.num_sampled_tokens == 120
        assert trajectory.spans[0].version == first
        assert trajectory.spans[-1].version == first + 1
        prompt, sampled = CODEC.encode_prompt("12+34="), trajectory.token_ids[-120:].tolist()
        fresh = trajectory.spans[-1].num_tokens
        expected = harness.reference.logprobs(harness.seed_of_version[first + 1], prompt, sampled)[-fresh:]
        np.testing.assert_allclose(trajectory.behavior_logprobs[-fresh:], expected, atol=1e-3)

    @staticmethod
    async def _publish_when_interrupted(harness: Harness, runner: TrajectoryRunner) -> None:
        """Hold the only slot between the interruption and the resume, and publish meanwhile."""
        async with runner.pool.lease():
            runner.pool.pause(harness.engine.engine_id)
            await harness.publish()
            runner.pool.resume(harness.engine.engine_id)

    async def test_a_request_that_arrives_during_a_swap_is_one_of_the_new_version(self, harness: Harness) -> None:
        prompt = CODEC.encode_prompt("12+34=;" * 40)  # longer than a block of any prefix cache
        await harness.sample(prompt, max_new_tokens=5)
        update = asyncio.create_task(harness.publish())
        outputs = []
        while not update.done():
            outputs.append(asyncio.create_task(harness.sample(prompt, max_new_tokens=4)))
            await asyncio.sleep(0.002)
        await within(update)
        newest = [output for output in await asyncio.gather(*outputs) if len(output.spans) == 1]
        newest = [output for output in newest if output.spans[0].version == harness.engine.version]
        newest.append(await harness.sample(prompt, max_new_tokens=4))
        for output in newest:
            np.testing.assert_allclose(output.logprobs, harness.expected(prompt, output), atol=1e-3)
