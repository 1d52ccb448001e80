"""GPUs without peer access: found by a process that sees all of them, and avoided by `weights.transport=auto`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.actors.engine.client import RemoteEngine
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.transports import DeviceMemoryTransport, SharedMemoryTransport
from penstock.dataflow.errors import PlacementError, WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.platform.cluster.actor_factory import RunActors
from penstock.platform.config.compose import compose_all
from penstock.platform.config.schema import RunConfig
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.transport.device_memory import without_peer_access
from tests.layouts import torch_layout

NORM = TensorSpec("model.norm.weight", (640,))
FAKE_TORCH = """
import os
from types import SimpleNamespace
assert "CUDA_VISIBLE_DEVICES" not in os.environ
class cuda:
    device_count = staticmethod(lambda: 4)
    get_device_properties = staticmethod(lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    can_device_access_peer = staticmethod(lambda one, other: {one, other} in ({0, 1}, {2, 3}))
"""
"""A machine of four GPUs, of which 0 and 1, and 2 and 3, have peer access."""


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.usefixtures("four_gpus")
def test_pairs_without_peer_access_are_found_by_number_and_uuid() -> None:
    pairs = [("0", "0"), ("0", "1"), ("0", "2"), ("0", "2"), ("GPU-uuid-2", "GPU-uuid-3"), ("GPU-uuid-1", "GPU-uuid-2")]
    assert without_peer_access(pairs) == [("0", "2"), ("GPU-uuid-1", "GPU-uuid-2")]
    assert without_peer_access([("MIG-1", "MIG-2")]) == [("MIG-1", "MIG-2")]


def test_one_device_alone_needs_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert without_peer_access([("0", "0")]) == []
    with pytest.raises(WeightSyncError, match="peer access between GPUs is not known: FileNotFoundError"):
        without_peer_access([("0", "1")])


class FakeTrainer:
    """Two ranks on one node."""

    node_id = "node-a"
    nodes = ("node-a", "node-a")

    def __init__(self, closed: list[tuple[str, str]] | None) -> None:
        self.closed = closed

    async def without_peer_access(self, engine_devices: list[str]) -> list[tuple[str, str]]:
        assert engine_devices == ["2", "3"]
        if self.closed is None:
            raise WeightSyncError("weights: peer access between GPUs is not known: TimeoutExpired.")
        return self.closed

    async def training_sharding(self) -> tuple[TrainingSharding, str]:
        return TrainingSharding((NORM,), num_replicas=2), "unused"


class FakeEngine:
    engine_id, node_id, version = EngineId("engine-0"), "node-a", -1

    async def seen_devices(self) -> list[str]:
        return ["2", "3"]

    async def layout(self, tensors: Any) -> Any:
        return torch_layout(list(tensors)).layout


def configured(*overrides: str) -> RunConfig:
    composition = compose_all(["experiment=math_qwen_8gpu", *overrides])
    assert composition.config is not None, composition.problems
    return composition.config


async def exported(config: RunConfig, closed: list[tuple[str, str]] | None) -> Any:
    trainer, engine = cast("TrainerClient", FakeTrainer(closed)), cast("RemoteEngine", FakeEngine())
    actors = RunActors([engine], trainer, cast("Any", None), cast("Any", SimpleNamespace()), None, None)
    return await actors._export(EnginePool([engine], 4), config)


async def test_auto_uses_device_memory_only_with_peer_access_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(await exported(configured(), []), DeviceMemoryTransport)
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        assert isinstance(await exported(configured(), [("0", "2"), ("1", "2")]), SharedMemoryTransport)
        assert isinstance(await exported(configured(), None), SharedMemoryTransport)
    first, second = (record.getMessage() for record in caplog.records)
    assert "GPU 0 of the trainer and GPU 2 of an engine and 1 more pairs have no peer access, so versions go" in first
    assert "peer access between GPUs is not known: TimeoutExpired, so versions go through shared memory" in second


async def test_cuda_ipc_that_was_asked_for_is_refused_with_the_devices() -> None:
    with pytest.raises(
        PlacementError, match=r"cuda_ipc: GPU 0 .* GPU 2 .* no peer access\. Use weights\.transport=auto"
    ):
        await exported(configured("weights.transport=cuda_ipc"), [("0", "2")])
