"""Engines that lose requests at random, under the shipping flow in virtual time: no group is lost or trained twice.

The simulator fences an engine in the tick in which it kills it, so that nothing is ever lost there without a fence.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import EngineId, GroupId
from penstock.dataflow.staleness import ExpiryPolicy
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.run.flow import Flow
from penstock.rollout.engine_pool import pool
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow, next_groups
from tests.virtual_time import run_virtual

STEPS, BATCH = 8, 3


@dataclass(frozen=True)
class Story:
    """The scenario of a seed."""

    seed: int

    @property
    def on_expiry(self) -> ExpiryPolicy:
        return list(ExpiryPolicy)[self.seed % 3]

    @property
    def streamed(self) -> bool:
        return self.seed % 5 == 0

    @property
    def surplus(self) -> int:
        may_have = self.on_expiry is ExpiryPolicy.WAIT and not self.streamed
        return 2 if may_have and self.seed % 2 else 0


def lossy_engine(index: int, rng: random.Random) -> FakeEngine:
    """One request in seven is lost, before its first token or within its first eight."""

    def length(_serial: int) -> int:
        return 1 + int(rng.expovariate(0.2))

    drawn: dict[int, int | None] = {}

    def loses_at(serial: int) -> int | None:
        if serial not in drawn:
            drawn[serial] = rng.randrange(8) if rng.random() < 0.15 else None
        return drawn[serial]

    return FakeEngine(EngineId(f"e{index}"), length=length, loses_at=loses_at)


def rewards(rng: random.Random) -> Callable[[Trajectory], float | TrajectoryError]:
    return lambda _: TrajectoryError("reward", "planted") if rng.random() < 0.05 else rng.random()


async def train(flow: Flow, engines: list[FakeEngine], rng: random.Random) -> list[GroupId]:
    """The groups that were trained; some steps are skipped, and engines get each version one after the other."""
    trained: list[GroupId] = []
    version = 0
    async with flow:
        while version < STEPS:
            groups = await next_groups(flow)
            for group in groups:
                assert 0 <= group.staleness(flow.core.version) <= flow.core.limits.max_staleness  # I1
            if rng.random() < 0.1:
                flow.skip()
                continue
            trained += [group.group_id for group in groups]
            version += 1
            for engine in rng.sample(engines, len(engines)):
                engine.version = version
                await asyncio.sleep(0)
            flow.ports.runner.pool.set_min_version(version)
            flow.advance(version)
    return trained


@pytest.mark.parametrize("seed", range(20))
def test_what_engines_lose_is_resumed_or_fails_and_every_group_ends_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "LOSSES_IN_A_ROW", 10**9)  # random losses of healthy engines fence none of them
    story, rng = Story(seed), random.Random(seed)

    async def main() -> Counter[str]:
        engines = [lossy_engine(index, rng) for index in range(3)]
        flow = make_flow(
            engines,
            FakeRewards(rewards(rng)),
            batch=BATCH,
            eta=rng.randrange(4),
            steps=STEPS,
            group_size=3,
            retries=5,
            engine_retries=9,
            slots=4,
            timeout_s=300,
            on_expiry=story.on_expiry,
            streamed=story.streamed,
            surplus=story.surplus,
        )
        trained = await train(flow, engines, rng)
        counts = flow.counts()
        assert len(trained) == len(set(trained)) == counts.trained == STEPS * BATCH, "I5: once each"
        assert counts.is_balanced, "I3: every group that was admitted has ended in one way"
        assert counts.live == 0
        assert not list(flow.ports.runner.pool.leases()), "no slot is left behind"
        assert flow.ports.runner.pool.num_waiting == 0
        return Counter({str(kind): count for kind, count in flow.ports.runner.stats.interruptions.items()})

    interruptions = run_virtual(main())
    assert interruptions["lost"] > 0, "else this proves nothing"
