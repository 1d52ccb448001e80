"""Publishing across nodes: the driver's side of weights/transport/process_group/endpoints.py.

Consumes: a new version of the trainer. Waits for: the training ranks to hold it, then for every end to have it.
Unblocked by: those; or a time-out of a leg, which ends the crossing for everyone. Then ends that do not answer are
given up with their engines, and the rest forms a new group and gets the version once more.

The ends are a weight receiver on every node with engines, or the engines themselves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.engine.client import InPlaceUpdate, Locations, RemoteEngine, in_service
from penstock.actors.ray_errors import ray_boundary, together
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.transports import PublishedVersion, PublishHandle, WeightTransport, already_published
from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.dataflow.ports import WeightManifest
from penstock.rollout.pool.pool import EnginePool
from penstock.weights.checksum import PartialSum
from penstock.weights.config import WeightsConfig
from penstock.weights.layout.engine import EngineSide
from penstock.weights.model_config import DType
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
from penstock.weights.transport.streaming import IN_PLACE

logger = logging.getLogger(__name__)

ATTEMPTS = 2
GRACE_S = 10.0
"""What a call may take beyond the time-outs of what it does."""
CALL_SHARE = 0.5
"""Of `weights.timeout_s`, for each message: who hangs is found before the whole publish is late, for all engines."""
PING_S = 30.0
SHUTDOWN_S = 5.0


class Receivers(Protocol):
    """Where versions arrive.

    Attributes:
        on_devices: In memory of the engines' devices; else in files that the engines of a node share.
    """

    on_devices: bool

    def addresses(self) -> tuple[ReceiverAddress, ...]:
        """Those of the engines in service now, in relay order: the node of the first training rank first."""
        ...

    async def prepare(self) -> None:
        """Start those that are new, end those that no engine needs any more."""
        ...

    def join(self, group_spec: Any, receiver: ReceiverAddress, place: int) -> Awaitable[Any]:
        """Let one join a crossing (a handle of it), as its `place`-th end."""
        ...

    def receive(self, receiver: ReceiverAddress, version: int) -> Awaitable[Any]:
        """Let one receive a version; its answer is for `payload`."""
        ...

    def payload(self, answers: Mapping[ReceiverAddress, Any]) -> Any:
        """What engines are given beside the manifest to find it."""
        ...

    async def fence_silent_receivers(self, why: str) -> None:
        """Fence off the engines of those that do not answer."""
        ...

    async def close(self) -> None:
        """End what was started."""
        ...


def _on(node: str) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


class NodeReceivers:
    """One process on every node with engines."""

    on_devices = False

    def __init__(self, pool: EnginePool, first_node: str, config: WeightsConfig) -> None:
        self._pool = pool
        self._first_node = first_node
        self._config = config
        self._type = ray.remote(concurrency_groups={"beside": 1})(WeightReceiverActor)
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
        fresh = [node for node in nodes if node not in self._receivers]
        for node in fresh:
            self._receivers[node] = self._type.options(**_on(node)).remote(self._config.directory)
        asked = [self._receivers[node].pid.remote() for node in fresh]
        pids = await together("weights: starting weight receivers", self._config.timeout_s, *asked)
        self._pids |= dict(zip(fresh, pids, strict=True))

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
                with ray_boundary(WeightSyncError, "ping"):
                    await asyncio.wait_for(receiver.pid.remote(), PING_S)
            except (WeightSyncError, TimeoutError):
                await self._end(node)
                for engine in in_service(self._pool):
                    if engine.node_id == node:
                        self._pool.fence(engine.engine_id, f"the weight receiver on its node is lost. {why}")

    async def close(self) -> None:
        """End the weight receivers, and free what they hold in shared memory."""
        calls = {asyncio.ensure_future(receiver.shutdown.remote()): node for node, receiver in self._receivers.items()}
        if calls:
            _, busy = await asyncio.wait(calls, timeout=SHUTDOWN_S)
            for call in busy:  # a version is on its way to them
                call.cancel()
                await self._end(calls[call])

    async def _end(self, node: str) -> None:
        """End a weight receiver that may not answer, and remove what it leaves in shared memory."""
        ray.kill(self._receivers.pop(node))
        sweep = ray.remote(remove_directories_of).options(**_on(node), max_retries=0)
        with suppress(ray.exceptions.RayError, TimeoutError):  # the node may be gone too
            await asyncio.wait_for(sweep.remote([self._pids.pop(node, 0)], self._config.directory), PING_S)


class EngineReceivers:
    """The engines themselves: every rank receives into a slot on its own device, or into its live parameters.

    Attributes:
        lacking: A version that only those engines are to get that have not acknowledged it; None: all are.
    """

    on_devices = True

    def __init__(self, pool: EnginePool, first_node: str) -> None:
        self.pending_version: int | None = None
        self._pool = pool
        self._first_node = first_node

    def addresses(self) -> tuple[ReceiverAddress, ...]:
        some = [
            one
            for one in self._engines().values()
            if self.pending_version is None or one.version != self.pending_version
        ]
        engines = sorted(some, key=lambda one: (one.node_id != self._first_node, one.node_id))
        return tuple(ReceiverAddress(engine.engine_id, engine.node_id) for engine in engines)

    async def prepare(self) -> None:
        """They are there already."""

    def join(self, group_spec: Any, receiver: ReceiverAddress, place: int) -> Awaitable[Any]:
        return self._engines()[receiver.name].join_transfer_group(group_spec, place)

    def receive(self, receiver: ReceiverAddress, version: int) -> Awaitable[Any]:
        return self._engines()[receiver.name].receive(version)

    def payload(self, answers: Mapping[ReceiverAddress, Any]) -> None:
        """The manifest says it all: it is in their slots."""

    async def fence_silent_receivers(self, why: str) -> None:
        for engine in self._engines().values():
            try:
                await asyncio.wait_for(engine.load(), PING_S)
            except (EngineLostError, TimeoutError):
                self._pool.fence(engine.engine_id, f"it does not answer. {why}")

    async def close(self) -> None:
        """They are not ended here."""

    def _engines(self) -> dict[str, RemoteEngine]:
        return {engine.engine_id: engine for engine in in_service(self._pool)}


class WeightReceiverActor(WeightReceiver):
    """A weight receiver in its own process: one on every node with engines, where weights come from other nodes."""

    def __init__(self, publish_in: str | None) -> None:
        self._folder = private_directory(publish_in)
        super().__init__(str(self._folder))

    @ray.method(concurrency_group="beside")
    def pid(self) -> int:
        """Answers also while a version is on its way."""
        return os.getpid()

    def shutdown(self) -> None:
        """Leave, and free the shared memory."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ProcessGroupTransport(WeightTransport):
    """Training ranks send each version to the ends, in a group of their own."""

    def __init__(
        self, trainer: TrainerClient, receivers: Receivers, layout: EngineSide, dtype: DType, config: WeightsConfig
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
        self._is_streamed = config.staging == "bucket" and receivers.on_devices
        self._call_timeout_s = config.timeout_s

    async def send(self, version: int) -> PublishHandle:
        await self._ensure_group(version)
        await self._trainer.ask("snapshot_weights", self._config.overlap)
        return self._deliver(version)

    async def _ensure_group(self, version: int) -> TransferGroupSpec:
        """Be in a crossing with every end that is to get a version."""
        if version == self._newest_version:
            self._group_spec = None  # it is damaged somewhere: codecs begin again, so that all of it is sent
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
                logger.warning("%s What is left forms a new group, and gets v%d once more", error, version)
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

        sending = self._trainer.ask("send_weights", version, timeout_s=limit)
        sent, *answers = await together(f"publish v{version}", limit, sending, *receiving, interrupt=interrupt)
        manifest = group_spec.transfer.manifest(version, [part for one in sent for part in one.sums])
        payload = self._receivers.payload(dict(zip(group_spec.receivers, answers, strict=True)))
        share = None if self._config.codec == "int8_delta" else changed_share(sent)
        return PublishedVersion(manifest, payload, sum(one.num_bytes for one in sent), share)

    async def _form_group(self) -> TransferGroupSpec:
        """Make a crossing of the ends that are there now."""
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
            is_streamed=self._is_streamed,
        )
        limit = timeout_s + GRACE_S
        shared = ray.put(group_spec)
        await together(
            "weights: meeting",
            limit,
            self._trainer.ask("join_transfer_group", shared, timeout_s=limit),
            *(self._receivers.join(shared, receiver, place) for place, receiver in enumerate(receivers)),
        )
        self._group_spec, self._num_sent = group_spec, 0
        return group_spec

    async def _plan(self, first_node: str) -> ShardTransfer:
        planned = await self._trainer.plan_transfer(self._layout, self._dtype, first_node)
        folder = None if self._receivers.on_devices else planned.directory
        self._transfer = replace(planned, directory=folder, num_slots=self._config.num_slots)
        return self._transfer


class StreamingTransport(ProcessGroupTransport):
    """Training ranks send each version into the live parameters of frozen engines, which have no second shard.

    Waits for: a crossing with the engines that lack it, then for the training ranks to sum what they will send.
    Unblocked by: their answers; the version itself leaves when the engines are frozen (`InPlaceUpdate`), and stays as
    it is with the training ranks until then.
    """

    def __init__(
        self,
        trainer: TrainerClient,
        receivers: EngineReceivers,
        layout: EngineSide,
        dtype: DType,
        config: WeightsConfig,
    ) -> None:
        super().__init__(trainer, receivers, layout, dtype, config)
        self._engines = receivers
        self._call_timeout_s = CALL_SHARE * config.timeout_s
        self._streaming: InPlaceUpdate | None = None

    async def send(self, version: int) -> PublishHandle:
        if self._streaming is not None:
            await self._streaming.over()
        self._engines.pending_version = version  # on a second try those that have taken it serve, and are left alone
        group_spec = await self._ensure_group(version)
        await self._trainer.ask("snapshot_weights", self._config.overlap)
        announced = await self._trainer.ask("bucket_checksums", timeout_s=self._config.timeout_s)
        self._streaming = self._stream(version, group_spec)
        sent_bytes = sum(one.num_bytes for one in announced)
        return already_published(_manifest(version, group_spec, announced), self._streaming, sent_bytes)

    def _stream(self, version: int, group_spec: TransferGroupSpec) -> InPlaceUpdate:
        num_before, self._num_sent = self._num_sent, self._num_sent + 1

        async def send() -> None:
            await self._trainer.ask("send_weights", version, timeout_s=self._config.timeout_s + GRACE_S)

        def interrupt(cause: str) -> None:
            if self._group_spec is group_spec:
                self._group_spec = None
            TransferGroup.interrupt(self._store, group_spec.generation, num_before, group_spec.members, cause)

        return InPlaceUpdate(version, [receiver.name for receiver in group_spec.receivers], send, interrupt)


def _manifest(version: int, group_spec: TransferGroupSpec, announced: list[BucketChecksums]) -> WeightManifest:
    sums = tuple(one for rank in announced for one in rank.sums)
    parts = [PartialSum(one.rank, one.buffer, one.checksum) for one in sums]
    return replace(group_spec.transfer.manifest(version, parts), location=IN_PLACE, bucket_sums=sums)
