"""Weights from the nodes of the trainer to those of the engines: who takes part, and the ends.

A version arrives in one of two ways. Through main memory, over gloo: on every node with engines there is a weight
receiver, a process that receives shards into files in the node's shared memory, in the engines' own layout; engines
find them there as if the trainer were on their node (transport/shards.py). Or from device to device, over NCCL on GPUs:
every rank of every engine receives into a slot of its own (transport/device_memory.py), beside decoding. Either way the
trainer sends each version once, to the first end; the ends hand it on (planner/relay.py).

States of a version: held by the training ranks (as it is, or as a copy so that training may go on) → crossing, bucket
by bucket → landed, in one of two slots, while the version before may still be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import BucketSum
from penstock.weights.checksum import PartialSum
from penstock.weights.codec.wire import CODECS
from penstock.weights.config import CodecName
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.planner.relay import relay_tree
from penstock.weights.transport.background import on_own_stream
from penstock.weights.transport.device_memory import DeviceSlot, slot_for
from penstock.weights.transport.process_group.group import TransferGroup
from penstock.weights.transport.process_group.members import Members, Route
from penstock.weights.transport.process_group.transfer import ExpectedBuckets, Tensors, Transfer
from penstock.weights.transport.shards import ShardFiles, ShardTransfer

_MAIN_MEMORY = torch.device("cpu")


def _numbered(device: torch.device) -> torch.device:
    """With its index, which NCCL needs."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


class ReceiverAddress(NamedTuple):
    """A weight receiver or an engine: what messages call it, and its node."""

    name: str
    node: str


@dataclass(frozen=True)
class TransferGroupSpec:
    """What everyone who takes part has to agree on. Made by the driver, again whenever ends join or leave.

    Attributes:
        transfer: Plan and buffers; its directory is each weight receiver's own.
        num_training: Training ranks.
        ends: Where it goes to, in relay order.
        on_devices: Messages are packed on the device of each process, which on GPUs makes it NCCL; else in main memory.
        store_at: Host and port of the store that everyone meets at.
        generation: A number that no earlier crossing at this store has.
        timeout_s: Longest wait for everyone, and then for each message, seconds.
        codec: What messages go through.
        is_streamed: Versions go into the engines' live parameters as they arrive, and there are no slots.
    """

    transfer: ShardTransfer
    num_training: int
    receivers: tuple[ReceiverAddress, ...]
    on_devices: bool
    store_at: tuple[str, int]
    generation: int
    timeout_s: float
    codec: CodecName
    is_streamed: bool = False

    @property
    def members(self) -> Members:
        """A group rank for each training rank, and one for each tensor-parallel rank of each end."""
        return Members(
            self.num_training, tuple(receiver.name for receiver in self.receivers), len(self.transfer.buffers)
        )

    def join(self, group_rank: int, device: torch.device) -> Transfer:
        """Meet everyone, and be ready for any number of versions.

        Args:
            group_rank: Of this process, in `members`.
            device: That it computes on.

        Raises:
            WeightSyncError: If a participant does not join in time, who is named.
        """
        members = self.members
        group = TransferGroup(
            self.store_at,
            members,
            group_rank,
            timeout_s=self.timeout_s,
            generation=self.generation,
            device=_numbered(device) if self.on_devices else _MAIN_MEMORY,
        )
        route: Route = members.to_engines(relay_tree([receiver.node for receiver in self.receivers]))
        codec = None if self.codec == "full" else CODECS[self.codec]
        return Transfer(group, self.transfer.plan, route, TORCH_DTYPES[self.transfer.dtype], codec)


class SendReport(NamedTuple):
    """What one training rank has sent of one version.

    Attributes:
        sums: What it adds to the checksums of the engines' parameters.
        num_bytes: To other processes, headers included.
        num_elements: That went through a codec; 0 without one.
        num_changed: Of them, since the version before; all of those whose version before nobody knows.
    """

    sums: list[PartialSum]
    num_bytes: int
    num_elements: int
    num_changed: int


class BucketChecksums(NamedTuple):
    """What one training rank is about to send of one version.

    Attributes:
        sums: Bucket by bucket.
        num_bytes: To other processes.
    """

    sums: list[BucketSum]
    num_bytes: int


def changed_share(sent: Iterable[SendReport]) -> float | None:
    """Share of the elements that differ from the version before, over all ranks; None without a codec."""
    counted = [(one.num_changed, one.num_elements) for one in sent]
    num_elements = sum(elements for _, elements in counted)
    return sum(changed for changed, _ in counted) / num_elements if num_elements else None


class WeightSender:
    """One training rank's end. What it holds survives a crossing, for the next one to send it again."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """Hold nothing; `device` is what the rank computes on."""
        self._rank = rank
        self._device = device
        self._packs_on = _MAIN_MEMORY
        self._held: dict[str, torch.Tensor] = {}
        self._sent: set[str] = set()
        self._dtype = torch.float32
        self._transfer: Transfer | None = None

    def join(self, group_spec: TransferGroupSpec) -> None:
        """Join; the crossing before is left.

        Raises:
            WeightSyncError: If a participant does not join in time.
        """
        self.close()
        self._dtype = TORCH_DTYPES[group_spec.transfer.dtype]
        self._sent = {copy.tensor for copy in group_spec.transfer.plan.copies if copy.src_rank == self._rank}
        self._packs_on = self._device if group_spec.on_devices else _MAIN_MEMORY
        self._transfer = group_spec.join(self._rank, self._device)

    def hold(self, tensors: Tensors, *, copies: bool) -> None:
        """Take a version.

        Args:
            tensors: Name -> what this rank holds of it, flat.
            copies: Copy what this rank sends to where messages are packed, in the wire dtype, so that training may go
                on at once; otherwise the tensors must not change before `send` has returned.
        """
        mine = {name: tensors[name] for name in self._sent}
        if not copies:
            self._held = mine
        for name, tensor in mine.items() if copies else ():
            if name not in self._held:
                self._held[name] = torch.empty(tensor.shape, dtype=self._dtype, device=self._packs_on)
            self._held[name].copy_(tensor.detach())
        if self._packs_on.type == "cuda":
            torch.cuda.synchronize(self._packs_on)  # it is sent from another stream

    def sums(self) -> BucketChecksums:
        """What is held, as it will be sent. Reads all of it; nothing else may be sent meanwhile."""
        assert self._transfer is not None, "join comes first"
        with on_own_stream(self._packs_on):
            return BucketChecksums(list(self._transfer.bucket_sums(self._held)), self._transfer.num_sent_bytes)

    def send(self, version: int) -> SendReport:
        """Send what is held; may run beside training.

        Raises:
            WeightSyncError: If a peer is lost or too late. The crossing is over then.
        """
        assert self._transfer is not None, "join comes first"
        with on_own_stream(self._packs_on):
            traffic = self._transfer.run(version, self._held, {}, wants_sums=True)
        assert traffic.sums is not None, "they were asked for"
        return SendReport(traffic.sums, traffic.sent_bytes.total(), traffic.num_elements, traffic.num_changed)

    def close(self) -> None:
        """Leave."""
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = None


class _Joined(NamedTuple):
    """What a weight receiver works with while a crossing lasts; `transfers` by tensor-parallel rank."""

    transfer: ShardTransfer
    files: ShardFiles
    threads: ThreadPoolExecutor
    transfers: list[Transfer]


class WeightReceiver:
    """One node's end: all tensor-parallel ranks of the engines there."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._joined: _Joined | None = None

    def join(self, group_spec: TransferGroupSpec, node: str) -> None:
        """Join as every rank of an engine at once; the crossing before is left.

        Raises:
            WeightSyncError: If a participant does not join in time, or shared memory is too small for two versions.
        """
        self.close()
        transfer = replace(group_spec.transfer, directory=self._directory)
        files, replica = ShardFiles(transfer), [receiver.node for receiver in group_spec.receivers].index(node)
        ranks = [group_spec.members.engine(replica, rank) for rank in range(len(transfer.buffers))]
        threads = ThreadPoolExecutor(len(ranks), thread_name_prefix="receiver")
        self._joined = _Joined(transfer, files, threads, [])
        self._joined.transfers.extend(threads.map(lambda rank: group_spec.join(rank, _MAIN_MEMORY), ranks))

    def receive(self, version: int) -> str:
        """Receive a version into its slot; returns the folder.

        Raises:
            WeightSyncError: If a peer is lost or too late. What has arrived must not be used.
        """
        joined = self._joined
        assert joined is not None, "join comes first"

        def receive(rank: int) -> None:
            before = joined.files.buffers(version - 1, rank)
            joined.transfers[rank].run(version, {}, joined.files.buffers(version, rank), held=before)

        list(joined.threads.map(receive, range(len(joined.transfers))))
        return str(joined.transfer.folder(version))

    def close(self) -> None:
        """Leave; the files stay."""
        if self._joined is not None:
            for transfer in self._joined.transfers:
                transfer.close()
            self._joined.threads.shutdown(cancel_futures=True)
        self._joined = None


class DeviceReceiver:
    """Where versions arrive that cross from device to device: one engine rank's own end, in its own process.

    Consumes: the messages of the training ranks, or of the engine before it in the relay. Waits for: everyone at a
    meeting, then each message. Unblocked by: those, a lost peer, or the time-out of the leg, which ends the crossing.
    It runs in a thread beside decoding, and on a GPU on a stream of its own; what has arrived is complete when
    `receive` returns. One slot is enough, as in device_memory.py: no version is sent before every engine has
    acknowledged the one before. Of a crossing that is streamed there is none: `stream` puts every bucket into live
    parameters, and generation stands still.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        """Belong to a rank of an engine that computes on `device`."""
        self._slot: DeviceSlot | None = None
        self._rank = rank
        self._device = device
        self._transfer: Transfer | None = None

    def join(self, group_spec: TransferGroupSpec, replica: int, known: DeviceSlot | None) -> DeviceSlot | None:
        """Meet everyone as a rank of the `replica`-th end; the crossing before is left.

        Args:
            group_spec: Who takes part in what.
            replica: Place of this engine among its ends.
            known: The slot that this rank has, if it has one: taken if it fits.

        Returns:
            The slot that versions arrive in; None if they are streamed.

        Raises:
            WeightSyncError: If a participant does not join in time, or there is no memory for a version.
        """
        self.close()
        with on_own_stream(self._device):
            transfer, slot = group_spec.transfer, None
            if not group_spec.is_streamed:
                slot = slot_for(known, transfer.buffers[self._rank], TORCH_DTYPES[transfer.dtype], self._device)
            self._transfer = group_spec.join(group_spec.members.engine(replica, self._rank), self._device)
        self._slot = slot
        return slot

    def receive(self, version: int) -> None:
        """Receive a version into the slot.

        Raises:
            WeightSyncError: If a peer is lost or too late. What has arrived must not be used.
        """
        if self._transfer is None or self._slot is None:
            raise WeightSyncError(f"publish v{version}: rank {self._rank} of this engine has joined no crossing.")
        with on_own_stream(self._device):
            self._transfer.run(version, {}, self._slot.buffers)

    def stream(self, version: int, sums: Iterable[BucketSum], live: Mapping[str, torch.Tensor]) -> None:
        """Receive a version into live parameters, which nothing may read meanwhile.

        Args:
            version: Of the policy.
            sums: What its buckets must be.
            live: Name -> flat parameter.

        Raises:
            WeightSyncError: If a bucket is damaged, or a peer is lost or too late: they are of no version then.
        """
        if self._transfer is None:
            raise WeightSyncError(f"publish v{version}: rank {self._rank} of this engine has joined no crossing.")
        with on_own_stream(self._device):
            self._transfer.run(version, {}, live, expected=ExpectedBuckets(sums))

    @property
    def extra_bytes(self) -> int:
        """Memory that messages take; at most one bucket, since an engine only receives and passes on."""
        return 0 if self._transfer is None else self._transfer.extra_bytes

    def close(self) -> None:
        """Leave; the slot stays."""
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = None
