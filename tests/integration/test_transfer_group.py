"""Weights across nodes: two Ray nodes on one machine, trainer ranks and engines on both, and a weight receiver that is
lost in the middle of a version.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.cluster import RANK_CONCURRENCY
from penstock.actors.engine.actor import EngineActor
from penstock.actors.engine.client import RemoteEngine
from penstock.actors.processes import end_processes, ray_processes
from penstock.actors.trainer.actor import TrainerRank
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.process_group import (
    EngineReceivers,
    InPlaceTransport,
    NodeReceivers,
    ProcessGroupTransport,
)
from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.actors.weights.transports import GatherTransport, PublishHandle, is_one_node
from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.spec import TrainerSpec
from penstock.weights.config import WeightsConfig
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.shared_memory import default_directory, remove_directories_of
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


class Nodes(NamedTuple):
    trainer: TrainerClient
    engines: list[RemoteEngine]
    pool: EnginePool
    model: ModelConfig


def on(node: str) -> dict[str, object]:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy, "max_concurrency": 8}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tiny_model_config: ModelConfig) -> AsyncIterator[Nodes]:
    memory = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, ENVIRONMENT.get(name, "1"))
        cluster = Cluster(initialize_head=True, head_node_args=memory)
        cluster.add_node(**memory)
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            yield await started(tiny_model_config)
        finally:
            processes = ray_processes()
            ray.shutdown()
            cluster.shutdown()
            end_processes(processes)
            remove_directories_of(process.pid for process in processes)


async def started(model: ModelConfig) -> Nodes:
    """A rank of a ZeRO-3 trainer and an engine on each node."""
    names = [node["NodeID"] for node in ray.nodes()]
    spec = TrainerSpec(
        model_path=str(model.path),
        model=model,
        trainer=TrainerConfig(
            backend="deepspeed",
            num_ranks=2,
            zero_stage=3,
            max_tokens_per_micro_batch=512,
            optimizer=OptimizerConfig(lr=1e-3),
        ),
        algorithm=AlgorithmConfig(),
        device="cpu",
        threads=1,
        seed=0,
        temperature=1.0,
        max_new_tokens=8,
    )
    rank_type = ray.remote(concurrency_groups=RANK_CONCURRENCY)(TrainerRank)
    ranks = [
        rank_type.options(num_cpus=0, scheduling_strategy=on(node)["scheduling_strategy"]).remote(spec, rank)
        for rank, node in enumerate(names)
    ]
    trainer = TrainerClient(ranks, WAIT_S)
    specs = [
        EngineSpec(
            engine_id=EngineId(f"engine-{index}"),
            model_path=str(model.path),
            model=model,
            engine=TorchEngineConfig(type="torch", max_num_seqs=4),
            device="cpu",
            update_mode="keep_kv",
            seed=0,
            threads=1,
        )
        for index in range(2)
    ]
    actors = [ray.remote(EngineActor).options(**on(node)).remote(spec) for spec, node in zip(specs, names, strict=True)]
    places = await asyncio.gather(*(actor.start.remote() for actor in actors), trainer.start(WAIT_S))
    engines = [
        RemoteEngine(spec.engine_id, actor, place) for spec, actor, place in zip(specs, actors, places[:2], strict=True)
    ]
    return Nodes(trainer, engines, EnginePool(engines, 4), model)


async def test_gathered_versions_reach_engines_on_every_node_through_the_object_store(nodes: Nodes) -> None:
    trainer, _, pool, _ = nodes
    publisher = ActorWeightPublisher(
        pool, WeightsConfig(transport="gather", timeout_s=60.0), GatherTransport(trainer, pool)
    )
    report = await publisher.publish(0)  # acknowledged is what was read back from live parameters
    assert sorted(ack.engine_id for ack in report.acks) == ["engine-0", "engine-1"]
    await publisher.close()


async def test_versions_arrive_in_memory_of_the_engines_own_on_every_node(nodes: Nodes) -> None:
    trainer, _, pool, _ = nodes
    config = WeightsConfig(transport="process_group", timeout_s=60.0)
    transport = ProcessGroupTransport(
        trainer, EngineReceivers(pool, trainer.node_id), torch_layout(), "float32", config
    )
    publisher = ActorWeightPublisher(pool, config, transport)
    for version in range(2):
        report = await publisher.publish(version)
        assert sorted(ack.engine_id for ack in report.acks) == ["engine-0", "engine-1"]
        assert 0 < report.sent_bytes < 1.1 * report.num_bytes, "the first engine hands it on to the second"
    await publisher.close()


class DamagedOnce(InPlaceTransport):
    """Changes one bit of `version` after its checksums were computed, before it is sent."""

    damaged: int | None = 3

    async def send(self, version: int) -> PublishHandle:
        handle = await super().send(version)
        if version == self.damaged:
            self.damaged = None
            await self._trainer._ranks[1].__ray_call__.remote(flip_a_bit)
        return handle


def flip_a_bit(rank: Any) -> None:
    held = list(rank._sender._held.values())
    held[len(held) // 2].view(torch.int32)[0] ^= 1


async def test_in_place_updates_reach_engines_on_every_node_and_a_damaged_version_is_sent_once_more(
    nodes: Nodes,
) -> None:
    trainer, engines, pool, _ = nodes
    config = WeightsConfig(transport="process_group", staging="bucket", timeout_s=60.0)
    receivers = EngineReceivers(pool, trainer.node_id)
    transport = DamagedOnce(trainer, receivers, torch_layout(), "float32", config)
    publisher = ActorWeightPublisher(pool, config, transport)
    for version in (2, 3, 4):
        report = await publisher.publish(version)  # engines acknowledge what they read back
        assert sorted(ack.engine_id for ack in report.acks) == ["engine-0", "engine-1"]
        assert report.rewrites == (version == 3)
        assert 0 < report.sent_bytes < 1.1 * report.num_bytes, "the first engine hands it on to the second"
        assert min(ack.stall_s for ack in report.acks) > max(ack.stage_s for ack in report.acks), "all of it is frozen"
        await trainer.supervised_step(EXAMPLES)
    assert not pool.fenced
    with pytest.raises(WeightSyncError, match="cannot be sent to engine-0 again, which gets the next version"):
        await engines[0].update_weights(publisher._published.manifest, publisher._published.payload)
    await publisher.close()


async def test_versions_go_from_every_node_to_every_node_and_a_lost_weight_receiver_costs_only_its_engines(
    nodes: Nodes,
) -> None:
    trainer, engines, pool, _ = nodes
    assert not is_one_node(trainer, engines)
    config = WeightsConfig(codec="delta", timeout_s=60.0)
    receivers = NodeReceivers(pool, trainer.node_id, config)
    transport = ProcessGroupTransport(trainer, receivers, torch_layout(), "float32", config)
    publisher = ActorWeightPublisher(pool, config, transport)
    shares = []
    for version in range(5, 8):  # an engine acknowledges what it has read back from its live parameters
        report = await publisher.publish(version)
        assert sorted(ack.engine_id for ack in report.acks) == ["engine-0", "engine-1"]
        assert 0 < report.sent_bytes < 1.1 * report.num_bytes, "the trainer sends one policy, however many engines"
        shares.append(report.changed_share)
        if version > 5:
            await trainer.supervised_step(EXAMPLES)
    first, unchanged, trained = shares
    assert first == 1.0, "before the first version the receivers' values are unknown"
    assert unchanged == 0.0, "no step was made before it"
    assert 0.5 < trained <= 1.0, "in float32 nearly every element moves"
    pid = receivers._pids[engines[1].node_id]
    assert list(default_directory().glob(f"penstock-weights-{pid}-*"))
    os.kill(pid, signal.SIGSTOP)  # the others start, and wait for it in the middle of the version
    started = time.monotonic()
    publish = asyncio.create_task(publisher.publish(8))
    await asyncio.sleep(1.0)
    assert not publish.done()
    os.kill(pid, signal.SIGKILL)
    report = await publish
    assert time.monotonic() - started < config.timeout_s, "a death is no time-out"
    assert [ack.engine_id for ack in report.acks] == ["engine-0"]
    assert report.changed_share == 1.0, "a new group starts with a whole version"
    assert not list(default_directory().glob(f"penstock-weights-{pid}-*")), "its shared memory is freed"
    assert "the weight receiver on its node is lost" in pool.fenced[engines[1].engine_id]
    for version in (9, 10):
        await trainer.supervised_step(EXAMPLES)
        report = await publisher.publish(version)
        assert [(ack.engine_id, ack.version) for ack in report.acks] == [("engine-0", version)], "training continues"
    await publisher.close()
    await trainer.close()
    await asyncio.gather(*(engine.close() for engine in engines))
