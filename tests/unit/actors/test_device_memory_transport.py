"""Publishing into device memory over fakes: which engines get version buffers, and when, and engines without one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.actors.weights.transports import DeviceMemoryTransport
from penstock.dataflow.errors import EngineLostError, PlacementError, WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import WeightAck, WeightManifest
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.checksum import PartialSum
from penstock.weights.config import WeightsConfig
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.transport.device_memory import VersionBufferHandle
from penstock.weights.transport.shards import IN_DEVICE_MEMORY
from tests.layouts import torch_layout

NORM = TensorSpec("model.norm.weight", (640,))


@dataclass
class FakeTrainer:
    """Two ranks that hold all tensors, on devices of their own."""

    cannot_open: str | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    nodes: tuple[str, ...] = ("node-a", "node-a")
    version: int = 0
    step_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def training_sharding(self) -> tuple[TrainingSharding, str]:
        return TrainingSharding((NORM,), num_replicas=2), "unused"

    async def call_transfer(self, method: str, *arguments: Any) -> list[Any]:
        if method == "device":
            return ["GPU-a", "GPU-b"]
        if method == "open_version_buffers":
            engine_id, transfer, handles = arguments
            self.calls.append(("open", engine_id, {copy.src_rank for copy in transfer.plan.copies}, handles))
            return ["", "trainer rank 1: no peer access" if engine_id == self.cannot_open else ""]
        version, names = arguments
        self.calls.append(("write", version, names))
        return [[PartialSum(0, NORM.name, 3)], [PartialSum(0, NORM.name, 4)]]

    async def call_ranks(self, what: str, timeout_s: float, method: str, *arguments: Any) -> list[Any]:
        assert timeout_s == WeightsConfig().timeout_s
        return await self.call_transfer(method, *arguments)


@dataclass(eq=False)
class FakeEngine:
    engine_id: EngineId
    device: str
    failure: Exception | None = None
    node_id: str = "node-a"
    version: int = -1

    async def make_version_buffers(self, buffers: Any, dtype: str, num_writers: int) -> list[list[VersionBufferHandle]]:
        assert (buffers, dtype, num_writers) == (({NORM.name: 640},), "float32", 2)
        if self.failure is not None:
            raise self.failure
        return [[VersionBufferHandle(self.device, bytes([rank]), 0) for rank in range(num_writers)]]


def export_to(trainer: FakeTrainer, *engines: FakeEngine) -> tuple[DeviceMemoryTransport, EnginePool]:
    pool = EnginePool(engines, 4)  # type: ignore[arg-type]
    side = torch_layout([NORM])
    return DeviceMemoryTransport(trainer, pool, side, "float32", WeightsConfig()), pool  # type: ignore[arg-type]


async def test_version_buffers_are_opened_once_and_written_from_the_rank_on_the_engines_device():
    trainer = FakeTrainer()
    transport, pool = export_to(trainer, FakeEngine(EngineId("e0"), "GPU-a"), FakeEngine(EngineId("e1"), "GPU-b"))
    for version in (0, 1):
        manifest = (await (await transport.send(version))).manifest
        assert (manifest.version, manifest.location, manifest.num_shards) == (version, IN_DEVICE_MEMORY, 1)
        assert [entry.checksum for entry in manifest.entries] == [7], "of one engine's plan: all have equal checksums"
    opened = {call[1]: call[2] for call in trainer.calls if call[0] == "open"}
    assert opened == {"e0": {0}, "e1": {1}}
    assert [call[0] for call in trainer.calls] == ["open", "open", "write", "write"]
    pool.add(FakeEngine(EngineId("e2"), "GPU-b"))  # type: ignore[arg-type]
    pool.fence(EngineId("e0"), "lost")
    await transport.send(2)
    assert trainer.calls[-2][:2] == ("open", "e2")
    assert trainer.calls[-1] == ("write", 2, ["e1", "e2"])


@pytest.mark.parametrize("failure", [EngineLostError("it died"), WeightSyncError("expandable segments")])
async def test_an_engine_without_version_buffers_is_fenced_and_the_others_continue(failure: Exception):
    trainer = FakeTrainer(cannot_open="e1")
    engines = [FakeEngine(EngineId(f"e{index}"), "GPU-a") for index in range(3)]
    engines[0].failure = failure
    transport, pool = export_to(trainer, *engines)
    await transport.send(0)
    assert pool.fenced == {"e0": str(failure), "e1": "trainer rank 1: no peer access"}
    assert trainer.calls[-1] == ("write", 0, ["e2"])
    pool.fence(EngineId("e2"), "lost too")
    with pytest.raises(WeightSyncError, match=r"publish v1: no engine is left .*no peer access"):
        await transport.send(1)


@dataclass(eq=False)
class WrittenInto(FakeEngine):
    """Accepts only a version that was written into its own version buffers, after they were allocated."""

    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    has_buffers: bool = False

    async def make_version_buffers(self, buffers: Any, dtype: str, num_writers: int) -> list[list[VersionBufferHandle]]:
        self.has_buffers = True
        return await super().make_version_buffers(buffers, dtype, num_writers)

    async def update_weights(self, manifest: WeightManifest, payload: object = None) -> WeightAck:
        if not self.has_buffers or self.trainer.calls[-1] != ("write", manifest.version, [self.engine_id]):
            raise WeightSyncError(f"{self.engine_id}: its buffer has no version")
        self.version = manifest.version
        return WeightAck(self.engine_id, manifest.version, manifest.checksum, 0.0, 0.0)


async def test_the_only_engine_that_restarts_gets_the_served_version_written_into_its_buffers():
    trainer = FakeTrainer()
    transport, pool = export_to(trainer, WrittenInto(EngineId("e0"), "GPU-a", trainer=trainer))
    publisher = ActorWeightPublisher(pool, WeightsConfig(), transport, trainer)  # type: ignore[arg-type]
    await publisher.publish(0)
    pool.fence(EngineId("e0"), "lost")
    back = WrittenInto(EngineId("e0"), "GPU-a", trainer=trainer)
    await publisher.catch_up(back)  # type: ignore[arg-type]
    assert [(view.engine_id, view.version) for view in pool.views()] == [("e0", 0)]
    assert [call[0] for call in trainer.calls] == ["open", "write", "open", "write"]
    await publisher.close()


async def test_several_nodes_are_refused():
    with pytest.raises(PlacementError, match=r"weights\.transport=auto"):
        export_to(FakeTrainer(nodes=("node-a", "node-b")), FakeEngine(EngineId("e0"), "GPU-a"))
