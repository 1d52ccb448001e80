"""Engines of unequal speed: the shipping pool and routing share the work by speed, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple, cast

import pytest

from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import Engine, GenerateRequest, WeightManifest
from penstock.dataflow.sampling import SamplingParams
from penstock.platform.simulator.config import parse_simulation
from penstock.platform.simulator.engine import EngineCost, SimulatedEngine
from penstock.platform.simulator.simulation import simulate
from penstock.platform.simulator.world import LengthProfile, LengthTable, World, prompt_ids
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engine_pool.routing import RoutingName, make_policy
from tests.virtual_time import run_virtual

SPEEDS = (1.0, 1.0, 2.0, 4.0)
GROUP = 8
GROUPS = range(1024)
SLOTS = 16
GRAIN = 16
STEP_S = GRAIN * (5e-3 + 1e-4 * SLOTS)
"""Seconds of a decode step of a full engine of speed 1: the default costs of `penstock simulate`."""


class Spent(NamedTuple):
    seconds: float
    num_tokens: int


async def spent(
    speeds: tuple[float, ...],
    groups: Iterable[int],
    seed: int,
    routing: RoutingName = "prefix_aware",
    live: int = 10**6,
) -> Spent:
    """Virtual time until all answers of `groups` are sampled, of which at most `live` are requested at once."""
    world = World(LengthTable(LengthProfile("lognormal", 256, 0.5, 2048), GROUP, seed, GRAIN), 1, seed)
    cost = EngineCost(GRAIN * 5e-3, GRAIN * 1e-4, 0.0, SLOTS, 1_000_000, stage_s=0.0, swap_s=0.0)
    engines = [SimulatedEngine(EngineId(f"engine-{index}"), cost, world, speed) for index, speed in enumerate(speeds)]
    for engine in engines:
        await engine.update_weights(WeightManifest(0, "", (), 0, 0))
    pool = EnginePool(cast("list[Engine]", engines), SLOTS, policy=make_policy(routing, seed))
    places = asyncio.Semaphore(live)

    async def answer(task: int, member: int) -> int:
        limits = SamplingParams(2048 // GRAIN)
        async with places, pool.lease(limits.max_new_tokens, str(task)) as lease:
            request = GenerateRequest(RequestId(f"{task}/{member}#0"), prompt_ids(task, 1), limits)
            num_tokens = 0
            async for delta in lease.engine.generate(request):
                lease.received(len(delta.token_ids))
                num_tokens += len(delta.token_ids)
            return num_tokens

    started = asyncio.get_running_loop().time()
    lengths = await asyncio.gather(*(answer(task, member) for task in groups for member in range(GROUP)))
    return Spent(asyncio.get_running_loop().time() - started, sum(lengths))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("seed", "routing"), [(0, "prefix_aware"), (1, "prefix_aware"), (2, "prefix_aware"), (0, "least_loaded")]
)
def test_a_batch_takes_hardly_longer_than_if_every_engine_were_full_to_the_end(seed: int, routing: RoutingName) -> None:
    together = run_virtual(spent(SPEEDS, GROUPS, seed, routing))
    ideal_s = together.num_tokens / SLOTS * STEP_S / sum(SPEEDS)
    assert together.seconds <= 1.05 * ideal_s
    share = run_virtual(spent((min(SPEEDS),), GROUPS[:: len(SPEEDS)], seed, routing))
    assert share.seconds >= 1.6 * together.seconds, "with equal shares, the slowest engine ends last"


def test_with_fewer_requests_than_slots_each_engine_gets_them_by_its_measured_speed() -> None:
    """Half of the slots are free at any time, so the choice is that of the routing, not of the first free slot."""
    half = len(SPEEDS) * SLOTS // 2
    took = run_virtual(spent(SPEEDS, GROUPS[::2], 0, "least_loaded", half))
    by_speed = [half * speed / sum(SPEEDS) for speed in SPEEDS]
    equally = [half / len(SPEEDS)] * len(SPEEDS)
    assert took.seconds <= 1.1 * took.num_tokens / tokens_per_s(by_speed)
    assert took.seconds <= 0.9 * took.num_tokens / tokens_per_s(equally)


def test_hundreds_of_engines_run_in_virtual_time() -> None:
    """Ten thousand are a command (docs/concepts/simulation.md)."""
    words = "engines=250 slots=2 batch=32 group_size=8 eta=1 steps=2 profile=short engine_speeds=1,1,2,4"
    outcome = simulate(parse_simulation(words.split()), seed=0)
    assert outcome.violation is None
    assert len(outcome.trained.lengths) == 2 * 32 * 8


def tokens_per_s(running: list[float]) -> float:
    """Of engines with `SPEEDS` that decode so many sequences each."""
    return sum(speed * n / (GRAIN * (5e-3 + 1e-4 * n)) for speed, n in zip(SPEEDS, running, strict=True))
