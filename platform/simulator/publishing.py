"""The shipping publisher, watched: the checks learn what is published, and an engine that comes back catches up."""

from __future__ import annotations

import asyncio

from penstock.actors.publisher import ActorWeightPublisher
from penstock.dataflow.ports import PublishReport, WeightAck, WeightManifest
from penstock.platform.simulator.engine import SimulatedEngine
from penstock.platform.simulator.world import World
from penstock.rollout.update_modes import attempt
from penstock.weights.config import WeightsConfig

ATTEMPTS = 2


class WatchedPublisher:
    """The shipping publisher; tells the world what is published (I8).

    Attributes:
        is_publishing: Held during a publish; an engine that comes back waits for its end.
    """

    def __init__(self, publisher: ActorWeightPublisher, weights: WeightsConfig, world: World) -> None:
        self.is_publishing = asyncio.Lock()
        self._weights = weights
        self._publisher = publisher
        self._world = world

    async def publish(self, version: int) -> PublishReport:
        async with self.is_publishing:
            report = await self._publisher.publish(version)
        self._world.published = version
        self._world.note(f"published v{version} to {len(report.acks)} engines")
        return report

    async def delivered(self) -> PublishReport:
        return await self._publisher.delivered()

    async def catch_up(self, engine: SimulatedEngine) -> bool:
        """Give a restarted engine the version that is published, between two publishes; says whether it took it."""
        async with self.is_publishing:
            version = self._world.published
            manifest = WeightManifest(version, "simulated", (), 0, checksum=version * 31 + 7)
            for _ in range(ATTEMPTS):
                if isinstance(await attempt(engine, manifest, None, self._weights.timeout_s), WeightAck):
                    return True
            return False
