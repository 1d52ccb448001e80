"""Stop texts on every engine: which tokens an answer keeps, and what is recorded of them.

The runner reads the text, so the same holds for each engine; here it does, with the pool and the runner that ship.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from penstock.dataflow.ids import TaskId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engines.local_engine import LocalEngine
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner

from .engine_harness import JOURNAL_INTERVAL, Harness, within
from .partial_rollouts import CODEC, GREEDY, AbortsOnce

PROMPT = "12+34=?; 56-7*(8+9)=?; "


async def answer(engine: LocalEngine | AbortsOnce, sampling: SamplingParams, name: str) -> Trajectory:
    runner = TrajectoryRunner(EnginePool([engine], 4), CODEC, 60.0)
    return await within(runner.run(RolloutContext(Task(TaskId("t"), PROMPT), name), 0, sampling))


async def until_idle(engine: LocalEngine) -> None:
    while (await engine.load()).num_running:  # noqa: ASYNC110 - an engine has no event for it
        await asyncio.sleep(0.01)


def stop_text_over(whole: str, boundary: int) -> str:
    """The shortest text that ends two characters behind a boundary, begins as many before it, and is nowhere before."""
    texts = {begin: whole[begin : boundary + 2] for begin in range(boundary - 1)}
    return next(text for begin, text in sorted(texts.items(), reverse=True) if whole.find(text) == begin)


@pytest.mark.usefixtures("idle")
class StopTextContract:
    """Subclasses name the loop scope of their `harness` fixture with a module-level `pytestmark`."""

    @pytest.mark.parametrize("is_interrupted", [False, True], ids=["one request", "interrupted within the stop text"])
    async def test_an_answer_ends_with_the_token_that_completes_a_stop_text(
        self, harness: Harness, is_interrupted: bool
    ) -> None:
        whole = await answer(harness.engine, GREEDY, f"whole {is_interrupted}")
        sampled = whole.token_ids[whole.loss_mask].tolist()
        stop = stop_text_over(whole.response, len(CODEC.decode(sampled[:JOURNAL_INTERVAL])))  # in two deltas
        sampling = replace(GREEDY, stop=("never there", stop))
        for attempt in range(5 if is_interrupted else 1):  # a busy machine may join both deltas
            engine = AbortsOnce(harness.engine, after_deltas=1) if is_interrupted else harness.engine
            stopped = await answer(engine, sampling, f"stopped {is_interrupted} {attempt}")
            if isinstance(engine, AbortsOnce) and len(engine.requests) > 1:
                break
        else:
            assert not is_interrupted, "it was never interrupted"
        assert stopped.response == whole.response[: whole.response.find(stop) + len(stop)]
        assert (stopped.finish_reason, whole.finish_reason) == ("stop", "length")
        num_prompt, num_kept = len(PROMPT), stopped.num_sampled_tokens
        assert stop not in CODEC.decode(sampled[: num_kept - 1]), "an earlier token completes it"
        assert stopped.token_ids.tolist() == whole.token_ids[: num_prompt + num_kept].tolist()
        assert stopped.loss_mask.tolist() == [False] * num_prompt + [True] * num_kept
        assert stopped.spans == ((harness.engine.version, num_kept),)
        seed = harness.seed_of_version[harness.engine.version]
        ids = stopped.token_ids.tolist()
        expected = harness.reference.logprobs(seed, ids[:num_prompt], ids[num_prompt:])
        np.testing.assert_allclose(stopped.behavior_logprobs[num_prompt:], expected, atol=1e-4)
        await within(until_idle(harness.engine))  # the engine was told to stop, too
