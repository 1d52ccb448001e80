"""Publishing across nodes: the driver coordinates weights/transport/process_group/endpoints.py.

Consumes: a new version of the trainer. Waits for: the training ranks to hold it, then for every receiver to have it.
Unblocked by: those; or the time-out of a message, which ends the transfer for all participants. Then the engines of
receivers that do not answer are fenced, and the rest forms a new group and gets the version again.

The receivers are a weight receiver on every node with engines, or the engines themselves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.engine.client import InPlaceUpdate, Locations, RemoteEngine, in_service
from penstock.actors.ray_errors import answer_of, gather_answers, late_calls
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.transports import PublishedVersion, PublishHandle, WeightTransport, already_published
from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.dataflow.ports import WeightManifest
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.checksum import PartialSum
from penstock.weights.config import WeightsConfig
from penstock.weights.layout.sides import EngineLayout
from penstock.weights.model_config import DType
from penstock.weights.transport.in_place import IN_PLACE
from penstock.weights.transport.process_group.endpoints import (
    BucketChecksums,
    ReceiverAddress,
    TransferGroupSpec,
    WeightReceiver,
    changed_share,
)
from penstock.weights.transport.process_group.group import TransferGroup, serve_store
from penstock.weights.transport.shards import ShardTransfer
from penstock.weights.transport.shared_memory import private_directory, remove_directories_of

logger = logging.getLogger(__name__)

ATTEMPTS = 2
GRACE_S = 10.0
"""Time for a call beyond the time-outs of the operations in it, seconds."""
CALL_SHARE = 0.5
"""Share of `weights.timeout_s` for each message, so that a hanging process is found before the publish times out."""
PING_S = 30.0
SHUTDOWN_S = 5.0


class Receivers(Protocol):
    """The processes that receive versions."""

    on_devices: bool
    """They receive into memory of the engines' devices; else into files that the engines of a node share."""

    def addresses(self) -> tuple[ReceiverAddress, ...]:
        """Receivers of the engines now in service, in relay order: those on the node of training rank 0 first."""
        ...

    async def prepare(self) -> None:
        """Start new receivers, and end those that no engine needs any more."""
        ...

    def join(self, group_spec: Any, receiver: ReceiverAddress, place: int) -> Awaitable[Any]:
        """Have one join a transfer group (a Ray handle of its specification), as the `place`-th receiver."""
        ...

    def receive(self, receiver: ReceiverAddress, version: int) -> Awaitable[Any]:
        """Have one receive a version; its answer is passed to `payload`."""
        ...

    def payload(self, answers: Mapping[ReceiverAddress, Any]) -> Any:
        """What engines need in addition to the manifest to find the version."""
        ...

    async def fence_silent_receivers(self, why: str) -> None:
        """Fence the engines of receivers that do not answer."""
        ...

    async def close(self) -> None:
        """End the processes that `prepare` started."""
        ...


def _on(node: str) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


class NodeReceivers:
    """One weight receiver process on every node with engines."""

    on_devices = False

    def __init__(self, pool: EnginePool, first_node: str, config: WeightsConfig) -> None:
        self._pool = pool
        self._first_node = first_node
        self._config = config
        self._type = ray.remote(concurrency_groups={"ping": 1})(WeightReceiverActor)
        self._receivers: dict[str, Any] = {}
        self._pids: dict[str, int] = {}

    def addresses(self) -> tuple[ReceiverAddress, ...]:
        nodes = {engine.node_id for engine in in_service(self._pool)}
        return tuple(
            ReceiverAddress(f"weight receiver on node {node[:8]}", node)
            for node in sorted(nodes, key=lambda node: (node != self._first_node, node))
        )

    async def prepare(self) -> None:
        nodes = [receiver.node for receiver in self.addresses()]
        for node in self._receivers.keys() - set(nodes):
            await self._end(node)
        new = [node for node in nodes if node not in self._receivers]
        for node in new:
            self._receivers[node] = self._type.options(**_on(node)).remote(self._config.directory)
        calls = [self._receivers[node].pid.remote() for node in new]
        pids = await gather_answers("weights: starting weight receivers", self._config.timeout_s, *calls)
        self._pids |= dict(zip(new, pids, strict=True))

    def join(self, group_spec: Any, receiver: ReceiverAddress, place: int) -> Awaitable[Any]:  # noqa: ARG002 - a weight receiver knows its node
        joined: Awaitable[Any] = self._receivers[receiver.node].join.remote(group_spec, receiver.node)
        return joined

    def receive(self, receiver: ReceiverAddress, version: int) -> Awaitable[Any]:
        received: Awaitable[Any] = self._receivers[receiver.node].receive.remote(version)
        return received

    def payload(self, answers: Mapping[ReceiverAddress, Any]) -> Locations:
        return Locations({receiver.node: folder for receiver, folder in answers.items()})

    async def fence_silent_receivers(self, why: str) -> None:
        for node, receiver in list(self._receivers.items()):
            try:
                await answer_of(receiver.pid.remote(), PING_S, WeightSyncError, f"weight receiver on node {node}: ping")
            except WeightSyncError:
                await self._end(node)
                for engine in in_service(self._pool):
                    if engine.node_id == node:
                        self._pool.fence(engine.engine_id, f"the weight receiver on its node is lost. {why}")

    async def close(self) -> None:
        """End the weight receivers, and free their shared memory."""
        calls = {asyncio.ensure_future(receiver.shutdown.remote()): node for node, receiver in self._receivers.items()}
        if calls:
            for call in await late_calls(calls, SHUTDOWN_S):  # these are receiving a version
                call.cancel()
                await self._end(calls[call])

    async def _end(self, node: str) -> None:
        """End a weight receiver that may not answer, and remove its files from shared memory."""
        ray.kill(self._receivers.pop(node))
        sweep = ray.remote(remove_directories_of).options(**_on(node), max_retries=0)
        call = sweep.remote([self._pids.pop(node, 0)], self._config.directory)
        with suppress(WeightSyncError):  # the node may be lost too
            await answer_of(call, PING_S, WeightSyncError, f"weights: shared memory of node {node}")


class EngineReceivers:
    """The engines themselves: every rank receives into a buffer on its own device, or into its live parameters.

    Attributes:
        pending_version: Only engines that have not acknowledged this version are receivers; None: all are.
    """

    on_devices = True

    def __init__(self, pool: EnginePool, first_node: str) -> None:
        self.pending_version: int | None = None
        self._pool = pool
        self._first_node = first_node
        self._numbers = count()
        self._processes: WeakKeyDictionary[RemoteEngine, int] = WeakKeyDictionary()

    def addresses(self) -> tuple[ReceiverAddress, ...]:
        behind = [
            engine
            for engine in self._engines().values()
            if self.pending_version is None or engine.version != self.pending_version
        ]
        engines = sorted(behind, key=lambda engine: (engine.node_id != self._first_node, engine.node_id))
        return tuple(ReceiverAddress(one.engine_id, one.node_id, self._process(one)) for one in engines)

    async def prepare(self) -> None:
        """Does nothing: the engines are running."""

    def join(self, group_spec: Any, receiver: ReceiverAddress, place: int) -> Awaitable[Any]:
        return self._engines()[receiver.name].join_transfer_group(group_spec, place)

    def receive(self, receiver: ReceiverAddress, version: int) -> Awaitable[Any]:
        return self._engines()[receiver.name].receive(version)

    def payload(self, answers: Mapping[ReceiverAddress, Any]) -> None:
        """None: the manifest is enough, since each engine has the version in its own buffers."""

    async def fence_silent_receivers(self, why: str) -> None:
        for engine in self._engines().values():
            try:
                await answer_of(engine.load(), PING_S, EngineLostError, f"{engine.engine_id}: ping")
            except EngineLostError:
                self._pool.fence(engine.engine_id, f"it does not answer. {why}")

    async def close(self) -> None:
        """Does nothing: the engines are ended elsewhere."""

    def _process(self, engine: RemoteEngine) -> int:
        """A number that no engine had before: one that was restarted has joined no group yet."""
        if engine not in self._processes:
            self._processes[engine] = next(self._numbers)
        return self._processes[engine]

    def _engines(self) -> dict[str, RemoteEngine]:
        return {engine.engine_id: engine for engine in in_service(self._pool)}


class WeightReceiverActor(WeightReceiver):
    """A weight receiver in its own process: one on every node with engines, if weights come from other nodes."""

    def __init__(self, publish_in: str | None) -> None:
        self._folder = private_directory(publish_in)
        super().__init__(str(self._folder))

    @ray.method(concurrency_group="ping")
    def pid(self) -> int:
        """Answers also while a version is being received."""
        return os.getpid()

    def shutdown(self) -> None:
        """Leave the group, and free the shared memory."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ProcessGroupTransport(WeightTransport):
    """Training ranks send each version to the receivers in a separate process group."""

    def __init__(
        self, trainer: TrainerClient, receivers: Receivers, layout: EngineLayout, dtype: DType, config: WeightsConfig
    ) -> None:
        self._trainer = trainer
        self._receivers = receivers
        self._layout = layout
        self._dtype: DType = dtype
        self._config = config
        self._store = serve_store(ray.util.get_node_ip_address())
        self._group_spec: TransferGroupSpec | None = None
        self._generation = self._num_sent = 0
        self._transfer: ShardTransfer | None = None
        self._newest_version: int | None = None
        self._is_in_place = config.staging == "bucket" and receivers.on_devices
        self._call_timeout_s = config.timeout_s

    async def send(self, version: int) -> PublishHandle:
        await self._ensure_group(version)
        await self._trainer.call_transfer("snapshot_weights", self._config.overlap)
        return self._deliver(version)

    async def _ensure_group(self, version: int) -> TransferGroupSpec:
        """Form a group with every receiver of a version, unless the current group is that."""
        if version == self._newest_version:
            self._group_spec = None  # a receiver may hold damaged data: new codec states make it be sent whole
        self._newest_version = version
        if self._group_spec is not None and set(self._group_spec.receivers) == set(self._receivers.addresses()):
            return self._group_spec
        try:
            return await self._form_group()
        except WeightSyncError as error:
            await self._receivers.fence_silent_receivers(str(error))
            return await self._form_group()

    async def close(self) -> None:
        await self._receivers.close()

    async def _deliver(self, version: int) -> PublishedVersion:
        for attempt in range(ATTEMPTS):
            try:
                if self._group_spec is None:
                    await self._form_group()
                return await self._send_to_receivers(version)
            except WeightSyncError as error:
                self._group_spec = None
                if attempt == ATTEMPTS - 1:
                    raise
                logger.warning("%s The remaining participants form a new group, and v%d is sent again", error, version)
                await self._receivers.fence_silent_receivers(str(error))
        raise AssertionError("unreachable")

    async def _send_to_receivers(self, version: int) -> PublishedVersion:
        group_spec = self._group_spec
        assert group_spec is not None
        limit = self._config.timeout_s + GRACE_S
        receiving = [self._receivers.receive(receiver, version) for receiver in group_spec.receivers]
        num_before, self._num_sent = self._num_sent, self._num_sent + 1

        def interrupt(cause: str) -> None:
            TransferGroup.interrupt(self._store, group_spec.generation, num_before, group_spec.members, cause)

        sending = self._trainer.call_transfer("send_weights", version, timeout_s=limit)
        sent, *answers = await gather_answers(f"publish v{version}", limit, sending, *receiving, interrupt=interrupt)
        manifest = group_spec.transfer.manifest(version, [part for one in sent for part in one.sums])
        payload = self._receivers.payload(dict(zip(group_spec.receivers, answers, strict=True)))
        share = None if self._config.codec == "int8_delta" else changed_share(sent)
        return PublishedVersion(manifest, payload, sum(one.num_bytes for one in sent), share)

    async def _form_group(self) -> TransferGroupSpec:
        """Form a transfer group with the receivers of the engines now in service."""
        receivers = self._receivers.addresses()
        if not receivers:
            raise WeightSyncError("weights: no engine is left to publish to; the log says why each was fenced.")
        await self._receivers.prepare()
        self._generation += 1
        timeout_s, codec = self._call_timeout_s, self._config.codec
        group_spec = TransferGroupSpec(
            transfer=self._transfer or await self._plan(receivers[0].node),
            num_training=len(self._trainer.nodes),
            receivers=receivers,
            on_devices=self._receivers.on_devices,
            store_at=(ray.util.get_node_ip_address(), self._store.port),
            generation=self._generation,
            timeout_s=timeout_s,
            codec=codec,
            is_in_place=self._is_in_place,
        )
        limit = timeout_s + GRACE_S
        shared = ray.put(group_spec)
        await gather_answers(
            "weights: joining the transfer group",
            limit,
            self._trainer.call_transfer("join_transfer_group", shared, timeout_s=limit),
            *(self._receivers.join(shared, receiver, place) for place, receiver in enumerate(receivers)),
        )
        self._group_spec, self._num_sent = group_spec, 0
        return group_spec

    async def _plan(self, first_node: str) -> ShardTransfer:
        planned = await self._trainer.plan_transfer(self._layout, self._dtype, first_node)
        folder = None if self._receivers.on_devices else planned.directory
        self._transfer = replace(planned, directory=folder, num_buffers=self._config.num_buffers)
        return self._transfer


class InPlaceTransport(ProcessGroupTransport):
    """Training ranks send each version into the live parameters of frozen engines, which have no second shard.

    Waits for: a transfer group with the engines that lack the version, then for the training ranks to compute the
    checksums of its buckets. Unblocked by: their answers. The version itself is sent when the engines are frozen
    (`InPlaceUpdate`); the training ranks hold it unchanged until then.
    """

    def __init__(
        self,
        trainer: TrainerClient,
        receivers: EngineReceivers,
        layout: EngineLayout,
        dtype: DType,
        config: WeightsConfig,
    ) -> None:
        super().__init__(trainer, receivers, layout, dtype, config)
        self._engines = receivers
        self._call_timeout_s = CALL_SHARE * config.timeout_s
        self._update: InPlaceUpdate | None = None

    async def send(self, version: int) -> PublishHandle:
        if self._update is not None:
            await self._update.wait_sent()
        self._engines.pending_version = version  # on a second attempt, engines that have acknowledged it keep serving
        group_spec = await self._ensure_group(version)
        await self._trainer.call_transfer("snapshot_weights", self._config.overlap)
        checksums = await self._trainer.call_transfer("bucket_checksums", timeout_s=self._config.timeout_s)
        self._update = self._in_place_update(version, group_spec)
        sent_bytes = sum(of_rank.num_bytes for of_rank in checksums)
        return already_published(_manifest(version, group_spec, checksums), self._update, sent_bytes)

    def _in_place_update(self, version: int, group_spec: TransferGroupSpec) -> InPlaceUpdate:
        num_before, self._num_sent = self._num_sent, self._num_sent + 1

        async def send() -> None:
            await self._trainer.call_transfer("send_weights", version, timeout_s=self._config.timeout_s + GRACE_S)

        def interrupt(cause: str) -> None:
            if self._group_spec is group_spec:
                self._group_spec = None
            TransferGroup.interrupt(self._store, group_spec.generation, num_before, group_spec.members, cause)

        return InPlaceUpdate(version, [receiver.name for receiver in group_spec.receivers], send, interrupt)


def _manifest(version: int, group_spec: TransferGroupSpec, checksums: list[BucketChecksums]) -> WeightManifest:
    sums = tuple(one for of_rank in checksums for one in of_rank.sums)
    parts = [PartialSum(one.rank, one.buffer, one.checksum) for one in sums]
    return replace(group_spec.transfer.manifest(version, parts), location=IN_PLACE, bucket_sums=sums)
