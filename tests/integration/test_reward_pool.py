"""Which GPUs reward workers get from Ray: its GPUs here are numbers, workers and their processes are the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import ray

from penstock.actors.reward.client import RewardClient
from penstock.dataflow.errors import PlacementError
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.actor_factory import reward_workers, rewards_are_loaded
from penstock.platform.config.schema import RunConfig
from tests.answers import pair

from .logical_gpus import ray_with_gpus

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
NUM_GPUS = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_gpus() -> AsyncIterator[None]:
    async with ray_with_gpus(NUM_GPUS):
        yield


def judged(*overrides: str) -> RunConfig:
    """The demo with a pool of GPUs for its reward."""
    pool = f"+cluster.pools.judge={{device: gpu, count: {NUM_GPUS + 1}, memory_gib: 24}}"
    return compose_config(
        [
            "experiment=arithmetic",
            "reward.fn=tests.device_reward:Where",
            pool,
            "cluster.pools.cpu.memory_gib=64",
            *overrides,
        ]
    )


def release_lease(rewards: RewardClient) -> None:
    """End the workers, whether Ray has placed them or not."""
    for worker in rewards._workers:
        ray.kill(worker.actor)


async def test_every_worker_has_a_gpu_of_its_pool_and_its_process_sees_no_other(two_gpus: None) -> None:
    config = judged("reward.pool=judge", "reward.num_workers=2")
    rewards = reward_workers(config)
    try:
        await rewards_are_loaded(config, rewards)
        assert ray.available_resources().get("GPU", 0.0) == 0.0, "they are reserved"
        scores = await asyncio.gather(*(rewards.score(*pair("!")) for _ in range(4)))
    finally:
        await rewards.close()
        release_lease(rewards)
    assert [score.reward for score in scores] == [1.0] * 4
    assert sorted(score.parts["gpu"] for score in scores) == [0.0, 0.0, 1.0, 1.0]


async def test_without_a_pool_no_gpu_is_taken(two_gpus: None) -> None:
    rewards = reward_workers(judged())
    try:
        score = await rewards.score(*pair("!"))
        assert ray.available_resources()["GPU"] == NUM_GPUS
    finally:
        await rewards.close()
        release_lease(rewards)
    assert (score.reward, score.parts) == (0.0, {"gpu": -1.0})


async def test_more_workers_than_the_cluster_has_gpus_for_end_the_start_with_both_numbers(two_gpus: None) -> None:
    config = judged("reward.pool=judge", "reward.num_workers=3", "rollout.start_timeout_s=3")
    rewards = reward_workers(config)
    try:
        with pytest.raises(PlacementError, match=r"3 reward workers were not up within 3 s\. .*another reward.pool"):
            await rewards_are_loaded(config, rewards)
    finally:
        release_lease(rewards)


async def test_a_reward_that_does_not_load_on_its_pool_ends_the_start_with_the_cause(two_gpus: None) -> None:
    config = judged("reward.pool=judge", "reward.args={depth: 3}")
    rewards = reward_workers(config)
    try:
        with pytest.raises(PlacementError, match=r"starting the reward workers failed: ConfigError: (?s:.*)'depth'"):
            await rewards_are_loaded(config, rewards)
    finally:
        release_lease(rewards)


async def test_a_worker_that_dies_is_started_again_on_the_gpu_that_it_had_and_no_score_is_lost(two_gpus: None) -> None:
    config = judged("reward.pool=judge", "reward.num_workers=2")
    rewards = reward_workers(config)
    try:
        await rewards_are_loaded(config, rewards)
        await asyncio.gather(*(rewards.score(*pair("!")) for _ in range(4)))
        first = rewards._workers[0].actor
        ray.kill(first)
        scores = await asyncio.wait_for(asyncio.gather(*(rewards.score(*pair("!")) for _ in range(8))), 60.0)
        assert [score.reward for score in scores] == [1.0] * 8
        async with asyncio.timeout(60.0):
            while rewards._workers[0].actor is first or not rewards._workers[0].is_up:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        scores = await asyncio.gather(*(rewards.score(*pair("!")) for _ in range(4)))
    finally:
        await rewards.close()
        release_lease(rewards)
    assert sorted(score.parts["gpu"] for score in scores) == [0.0, 0.0, 1.0, 1.0]
