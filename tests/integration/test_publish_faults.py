"""Faults of a publish on one node, with a real trainer and real engines: damage in shared memory, a stopped engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import ray
import torch

from penstock.actors.cluster import Resources, start_engines, start_trainer
from penstock.actors.engine.client import RemoteEngine
from penstock.actors.processes import end_processes, ray_processes
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.actors.weights.transports import PublishHandle, SharedMemoryTransport
from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import GenerateRequest
from penstock.dataflow.sampling import SamplingParams
from penstock.platform.run.engine_restarts import EngineRestarts
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.spec import TrainerSpec
from penstock.weights.config import WeightsConfig
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.shards import ShardFiles
from penstock.weights.transport.shared_memory import remove_directories_of
from tests.command_line import ENVIRONMENT
from tests.layouts import torch_layout

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]
WAIT_S = 120.0
EXAMPLES = [((1, 2, 3), (4, 5, 6, 7)), ((3, 2), (1, 0, 9))]


class Node(NamedTuple):
    trainer: TrainerClient
    model: ModelConfig

    async def engines(self, prefix: str) -> list[RemoteEngine]:
        """Two engines."""
        return await start_engines(
            [engine_spec(self.model, f"{prefix}-{n}") for n in range(2)], [Resources()] * 2, WAIT_S
        )


def engine_spec(model: ModelConfig, name: str) -> EngineSpec:
    return EngineSpec(
        engine_id=EngineId(name),
        model_path=str(model.path),
        model=model,
        engine=TorchEngineConfig(type="torch", max_num_seqs=4),
        device="cpu",
        update_mode="keep_kv",
        seed=0,
        threads=1,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tiny_model_config: ModelConfig) -> AsyncIterator[Node]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, ENVIRONMENT.get(name, "1"))
        ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
        try:
            spec = TrainerSpec(
                model_path=str(tiny_model_config.path),
                model=tiny_model_config,
                trainer=TrainerConfig(
                    backend="torch", max_tokens_per_micro_batch=512, optimizer=OptimizerConfig(lr=1e-3)
                ),
                algorithm=AlgorithmConfig(),
                device="cpu",
                threads=1,
                seed=0,
                temperature=1.0,
                max_new_tokens=8,
            )
            yield Node(await start_trainer(spec, [Resources()], {"DS_ACCELERATOR": "cpu"}), tiny_model_config)
        finally:
            processes = ray_processes()
            ray.shutdown()
            end_processes(processes)
            remove_directories_of(process.pid for process in processes)


class DamagedOnce(SharedMemoryTransport):
    """Changes one bit of `version` in the copy that all engines read, after it was written for the first time."""

    def __init__(self, node: Node, engines: list[RemoteEngine], version: int) -> None:
        super().__init__(node.trainer, engines, torch_layout(), "float32", WAIT_S)
        self._damaged: int | None = version

    async def send(self, version: int) -> PublishHandle:
        publish_handle = await super().send(version)
        if version == self._damaged:
            assert self._transfer is not None
            shard = list(ShardFiles(self._transfer).tensors(version, 0).values())
            shard[len(shard) // 2].view(torch.int32)[3] ^= 1
            self._damaged = None
        return publish_handle


async def test_a_damaged_version_is_written_once_more_and_the_run_continues_with_every_engine(node: Node) -> None:
    engines = await node.engines("damaged")
    pool = EnginePool(engines, 4)
    publisher = ActorWeightPublisher(pool, WeightsConfig(timeout_s=60.0), DamagedOnce(node, engines, 1))
    reports = []
    for version in range(4):
        reports.append(await publisher.publish(version))  # engines acknowledge what they read back
        await node.trainer.supervised_step(EXAMPLES)
    assert [report.rewrites for report in reports] == [0, 1, 0, 0]
    assert [len(report.acks) for report in reports] == [2, 2, 2, 2]
    assert not pool.fenced
    await publisher.close()
    await asyncio.gather(*(engine.close() for engine in engines))


async def test_an_engine_that_never_acknowledges_is_named_and_fenced_and_training_continues(node: Node) -> None:
    engines = await node.engines("stopped")
    pool = EnginePool(engines, 4)
    transport = SharedMemoryTransport(node.trainer, engines, torch_layout(), "float32", WAIT_S)
    publisher = ActorWeightPublisher(pool, WeightsConfig(timeout_s=60.0), transport)
    await publisher.publish(0)
    await publisher.close()
    publisher = ActorWeightPublisher(pool, WeightsConfig(timeout_s=2.0), transport)
    stopped = await pid_of(engines[1])
    os.kill(stopped, signal.SIGSTOP)
    try:
        for version in (1, 2):
            await node.trainer.supervised_step(EXAMPLES)
            report = await publisher.publish(version)
            assert [ack.engine_id for ack in report.acks] == ["stopped-0"]
            assert pool.fenced == {EngineId("stopped-1"): "publish v1 took longer than 2 s"}
            assert pool.views()[0].version == version
    finally:
        os.kill(stopped, signal.SIGCONT)
    await publisher.close()
    await asyncio.gather(*(engine.close() for engine in engines))


async def test_a_killed_engine_is_restarted_and_has_the_served_version_before_it_serves(node: Node) -> None:
    engines = await node.engines("killed")
    pool = EnginePool(engines, 4)
    transport = SharedMemoryTransport(node.trainer, engines, torch_layout(), "float32", WAIT_S)
    publisher = ActorWeightPublisher(pool, WeightsConfig(timeout_s=60.0), transport)

    async def start(engine_id: EngineId) -> RemoteEngine:
        engines[1].kill()
        (engines[1],) = await start_engines([engine_spec(node.model, engine_id)], [Resources()], WAIT_S)
        return engines[1]

    async with EngineRestarts(pool, start, publisher.catch_up, max_restarts_per_hour=1).running():
        for version in (0, 1):
            await publisher.publish(version)
            await node.trainer.supervised_step(EXAMPLES)  # the trainer is ahead of the served version
        os.kill(await pid_of(engines[1]), signal.SIGKILL)
        async with pool.lease(avoid=engines[0].engine_id) as lease:
            request = GenerateRequest(RequestId("first"), (1, 2, 3), SamplingParams(max_new_tokens=64))
            with pytest.raises(EngineLostError) as loss:
                async for _ in lease.engine.generate(request):
                    pass
            lease.lost(loss.value, "group")  # as a trajectory runner does
        lost = engines[1]
        async with asyncio.timeout(WAIT_S):
            while pool.num_returned < 1:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0.05)
        assert engines[1] is not lost
        assert engines[1].version == 1, "from the file in shared memory; the trainer is ahead"
        again = GenerateRequest(RequestId("again"), (1, 2, 3), SamplingParams(max_new_tokens=4))
        deltas = [delta async for delta in engines[1].generate(again)]
        assert {span.version for delta in deltas for span in delta.spans} == {1}
        report = await publisher.publish(2)
        assert sorted(ack.engine_id for ack in report.acks) == ["killed-0", "killed-1"]
    await publisher.close()
    await asyncio.gather(*(engine.close() for engine in engines))


async def test_a_rank_that_writes_nothing_is_named_with_the_version_and_its_progress(node: Node) -> None:
    engines = await node.engines("waiting")
    transport = SharedMemoryTransport(node.trainer, engines, torch_layout(), "float32", WAIT_S)
    await transport.send(0)
    transport._timeout_s = 1.0
    (rank,) = node.trainer._ranks
    stopped = int(await rank.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(stopped, signal.SIGSTOP)
    try:
        message = r"publish v1: write_shards is not complete after 1 s .*: training rank 0 \(its process does not ans"
        with pytest.raises(WeightSyncError, match=message):
            await transport.send(1)
    finally:
        os.kill(stopped, signal.SIGCONT)
    transport._timeout_s = WAIT_S
    await (await transport.send(2))
    assert await rank.writing.remote() == "v2, checksums"
    await asyncio.gather(*(engine.close() for engine in engines))


async def pid_of(engine: RemoteEngine) -> int:
    actor: Any = engine._actor
    return int(await actor.__ray_call__.remote(lambda _: os.getpid()))
