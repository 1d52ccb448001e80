"""Weight transports within a node, and the gathering one. Across nodes: process_group.py.

Consumes: a new version of the trainer. Waits for: the training ranks. Unblocked by: their answers. `send` returns a
`PublishHandle` as soon as the trainer may change its weights; the handle is done once engines can fetch the version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ray

from penstock.actors.engine.client import RemoteEngine, in_service
from penstock.actors.ray_errors import silence_limit
from penstock.actors.trainer.client import TrainerClient
from penstock.dataflow.errors import EngineLostError, PlacementError, WeightSyncError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.config import NUM_BUFFERS, WeightsConfig
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.model_config import DType
from penstock.weights.transport.adapters import adapter_manifest
from penstock.weights.transport.shards import ShardTransfer


class PublishedVersion(NamedTuple):
    """A version that engines can fetch."""

    manifest: WeightManifest
    payload: Any = None
    """Needed in addition to the manifest: `Locations`, a handle of the bytes for engines without access to the file, or
    an `InPlaceUpdate`; None if the manifest is enough."""
    sent_bytes: int = 0
    """Bytes that the training ranks sent to other processes."""
    changed_share: float | None = None
    """Share of the elements that differ from the previous version, if a codec has counted them."""


PublishHandle = Awaitable[PublishedVersion]


class WeightTransport:
    """Makes versions available to engines."""

    async def send(self, version: int) -> PublishHandle:
        """Returns once the trainer may continue; the handle is done once engines can fetch the version."""
        raise NotImplementedError

    def check_reaches(self, engine: RemoteEngine) -> None:
        """Check that versions can reach an engine that joins or was restarted: by default they reach every node.

        Raises:
            PlacementError: If they cannot.
        """

    async def close(self) -> None:
        """Free resources that outlive the processes."""


def already_published(manifest: WeightManifest, payload: Any = None, sent_bytes: int = 0) -> PublishHandle:
    """A handle of a publish that is complete."""
    future: asyncio.Future[PublishedVersion] = asyncio.get_running_loop().create_future()
    future.set_result(PublishedVersion(manifest, payload, sent_bytes))
    return future


class GatherTransport(WeightTransport):
    """Rank 0 gathers whole tensors into a file in shared memory; engines on other nodes get its bytes."""

    def __init__(self, trainer: TrainerClient, pool: EnginePool) -> None:
        self._trainer = trainer
        self._pool = pool

    async def send(self, version: int) -> PublishHandle:
        manifest = await self._trainer.export(version)
        return already_published(manifest, _bytes_for_other_nodes(self._trainer, self._pool, manifest))


class AdapterTransport(WeightTransport):
    """Rank 0 gathers the adapters into a file in shared memory; engines on other nodes get its bytes."""

    def __init__(self, trainer: TrainerClient, pool: EnginePool, layout: EngineLayout, dtype: DType) -> None:
        self._trainer = trainer
        self._pool = pool
        self._layout = layout
        self._dtype: DType = dtype
        self._base: tuple[TensorEntry, ...] | None = None

    async def send(self, version: int) -> PublishHandle:
        if self._base is None:  # checksums of the base weights, which the engines must have been loaded with
            training, folder = await self._trainer.training_sharding()
            transfer = await asyncio.to_thread(ShardTransfer.between, training, self._layout, self._dtype, folder)
            parts = await self._trainer.call_transfer("base_sums", ray.put(transfer))
            self._base = transfer.manifest(0, [part for some in parts for part in some]).entries
        sent = await self._trainer.export_adapters(version)
        manifest = adapter_manifest(sent, self._base, self._layout.layout, self._layout.tp_size)
        return already_published(manifest, _bytes_for_other_nodes(self._trainer, self._pool, sent))


def _bytes_for_other_nodes(trainer: TrainerClient, pool: EnginePool, file: WeightManifest) -> ray.ObjectRef | None:
    """A file of rank 0 as bytes in the object store, if an engine is on another node; else None."""
    is_elsewhere = any(engine.node_id != trainer.node_id for engine in in_service(pool))
    return trainer.read_back(file) if is_elsewhere else None


class SharedMemoryTransport(WeightTransport):
    """Training ranks write each version into shared memory in the engines' own layout; the first one makes the plan."""

    def __init__(
        self,
        trainer: TrainerClient,
        engines: Sequence[RemoteEngine],
        layout: EngineLayout,
        dtype: DType,
        timeout_s: float,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        """Connect trainer and engines.

        Raises:
            PlacementError: If they are not on one node.
        """
        _check_one_node("shared_memory", trainer, engines)
        self._trainer = trainer
        self._layout = layout
        self._dtype: DType = dtype
        self._timeout_s = timeout_s
        self._num_slots = num_buffers
        self._transfer: ShardTransfer | None = None

    def check_reaches(self, engine: RemoteEngine) -> None:
        _check_same_node("shared_memory", self._trainer, engine)

    async def send(self, version: int) -> PublishHandle:
        what = f"publish v{version}"
        if self._transfer is None:
            planned = await self._trainer.plan_transfer(self._layout, self._dtype)
            transfer = replace(planned, num_buffers=self._num_slots)
            await self._trainer.call_ranks(what, self._timeout_s, "share_weights", ray.put(transfer))
            self._transfer = transfer
        parts = await self._trainer.call_ranks(what, self._timeout_s, "write_shards", version)
        return already_published(self._transfer.manifest(version, [part for some in parts for part in some]))


def is_one_node(trainer: TrainerClient, engines: Sequence[RemoteEngine]) -> bool:
    """Whether shared memory reaches from every training rank to every engine."""
    return len({*trainer.nodes, *(engine.node_id for engine in engines)}) == 1


def _check_one_node(transport: str, trainer: TrainerClient, engines: Sequence[RemoteEngine]) -> None:
    if not is_one_node(trainer, engines):
        raise PlacementError(
            f"weights: weights.transport={transport} uses memory of one node, but the trainer and the engines are on "
            "several. Set weights.transport=auto."
        )


def _check_same_node(transport: str, trainer: TrainerClient, engine: RemoteEngine) -> None:
    """Check a single engine; the run has begun on one node, so its route is fixed."""
    if not is_one_node(trainer, [engine]):
        raise PlacementError(
            f"weights: {engine.engine_id} was started on node {engine.node_id}, but weights.transport={transport} uses "
            f"memory of node {trainer.nodes[0]}, where this run began. Free a place on that node, or resume the run "
            "with weights.transport=process_group, which reaches other nodes."
        )


class DeviceMemoryTransport(WeightTransport):
    """Training ranks write each version into version buffers in the memory of the engines' devices, by CUDA IPC.

    Waits for: new engines to allocate their buffers, training ranks to open them and to write. Unblocked by: their
    answers. An engine whose buffer cannot be allocated or opened is fenced, and the run continues with the rest. If
    several training ranks hold an element, the one on the engine rank's device copies it, so each engine has its own
    plan, made when it connects.
    """

    def __init__(
        self, trainer: TrainerClient, pool: EnginePool, layout: EngineLayout, dtype: DType, config: WeightsConfig
    ) -> None:
        """Connect trainer and engines.

        Raises:
            PlacementError: If they are not on one node.
        """
        _check_one_node("cuda_ipc", trainer, in_service(pool))
        self._trainer = trainer
        self._pool = pool
        self._layout = layout
        self._dtype: DType = dtype
        self._timeout_s = config.timeout_s
        self._training: tuple[TrainingSharding, list[str]] | None = None
        self._transfers: dict[RemoteEngine, ShardTransfer] = {}

    def check_reaches(self, engine: RemoteEngine) -> None:
        _check_same_node("cuda_ipc", self._trainer, engine)

    async def send(self, version: int) -> PublishHandle:
        if self._training is None:
            training, _ = await self._trainer.training_sharding()
            self._training = training, await self._trainer.call_transfer("device")
        new = [engine for engine in in_service(self._pool) if engine not in self._transfers]
        await asyncio.gather(*(self._connect(engine, *self._training) for engine in new))
        left = [engine for engine in in_service(self._pool) if engine in self._transfers]
        self._transfers = {engine: self._transfers[engine] for engine in left}
        if not self._transfers:
            raise WeightSyncError(f"publish v{version}: no engine is left to receive it: {self._pool.no_engine_left()}")
        names = [engine.engine_id for engine in self._transfers]
        parts = await self._trainer.call_ranks(
            f"publish v{version}", self._timeout_s, "write_version_buffers", version, names
        )
        first = next(iter(self._transfers.values()))  # all have the same checksums; only the senders differ
        return already_published(first.manifest(version, [part for some in parts for part in some]))

    async def _connect(self, engine: RemoteEngine, training: TrainingSharding, devices: list[str]) -> None:
        """Have an engine allocate its version buffers, and every training rank open them."""
        buffers = self._layout.layout.buffers
        try:
            async with silence_limit(self._timeout_s):
                handles = await engine.make_version_buffers(buffers, self._dtype, len(devices))
        except TimeoutError:
            failure = f"publish: {engine.engine_id} has allocated no version buffers after {self._timeout_s:.0f} s"
        except (EngineLostError, WeightSyncError) as error:
            failure = str(error)
        else:
            engine_at = [of_writers[0].device for of_writers in handles]
            transfer = await asyncio.to_thread(
                ShardTransfer.between, training, self._layout, self._dtype, None, devices, engine_at
            )
            what = f"publish: version buffers of {engine.engine_id}"
            opening = ("open_version_buffers", engine.engine_id, transfer, handles)
            refusals = await self._trainer.call_ranks(what, self._timeout_s, *opening)
            failure = next(filter(None, refusals), "")
            if not failure:
                self._transfers[engine] = transfer
        if failure:
            self._pool.fence(engine.engine_id, failure)
