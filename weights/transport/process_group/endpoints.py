"""Weights from the nodes of the trainer to those of the engines: the transfer group, its senders and receivers.

A version is received in one of two ways. Through main memory, over gloo: every node with engines has a weight receiver,
a process that receives shards into files in the node's shared memory, in the engines' own layout; engines read them as
if the trainer were on their node (transport/shards.py). Or from device to device, over NCCL on GPUs: every engine rank
receives into its own version buffer (transport/device_memory.py) during decoding. In both cases the trainer sends each
version once, to the first receiver, and receivers relay it (planner/relay.py).

States of a version: held by the training ranks (the live weights, or a snapshot so that training may continue) → in
transfer, bucket by bucket → received, in one of two version buffers, while the previous version may still be read.
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
from penstock.weights.transport.device_memory import VersionBuffer, version_buffer_for
from penstock.weights.transport.process_group.group import TransferGroup
from penstock.weights.transport.process_group.members import Members, Route
from penstock.weights.transport.process_group.transfer import ExpectedBuckets, Tensors, Transfer
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, sent_part
from penstock.weights.transport.staging import on_own_stream

_MAIN_MEMORY = torch.device("cpu")


def _numbered(device: torch.device) -> torch.device:
    """The device with its index, which NCCL needs."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


class ReceiverAddress(NamedTuple):
    """A weight receiver or an engine."""

    name: str
    """In error messages."""
    node: str
    process: int = 0
    """Its number: a restarted engine is another process of the same name, which has joined no group yet."""


@dataclass(frozen=True)
class TransferGroupSpec:
    """Parameters that all participants must agree on. The driver makes a new one whenever receivers join or leave."""

    transfer: ShardTransfer
    """Plan and buffers; each weight receiver uses a directory of its own."""
    num_training: int
    """Training ranks."""
    receivers: tuple[ReceiverAddress, ...]
    """In relay order."""
    on_devices: bool
    """Messages are packed on each process's device, so on GPUs NCCL is used; else in main memory."""
    store_at: tuple[str, int]
    """Host and port of the store where the participants rendezvous."""
    generation: int
    """A number that no earlier group at this store has."""
    timeout_s: float
    """Longest wait for all participants, and then for each message, seconds."""
    codec: CodecName
    """That messages are encoded with."""
    is_in_place: bool = False
    """Versions are received into the engines' live parameters; there are no version buffers."""

    @property
    def members(self) -> Members:
        """A group rank for each training rank, and one for each tensor-parallel rank of each receiver."""
        return Members(
            self.num_training, tuple(receiver.name for receiver in self.receivers), len(self.transfer.buffers)
        )

    def join(self, group_rank: int, device: torch.device) -> Transfer:
        """Join the group, ready for any number of versions.

        Args:
            group_rank: Of this process, in `members`.
            device: That it computes on.

        Raises:
            WeightSyncError: If a participant does not join in time; it is named.
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
    """What one training rank has sent of one version."""

    sums: list[PartialSum]
    """Its contributions to the checksums of the engines' parameters."""
    num_bytes: int
    """Sent to other processes, headers included."""
    num_elements: int
    """Encoded with a codec; 0 without one."""
    num_changed: int
    """Encoded elements that differ from the previous version; all, if the receivers' values are unknown."""


class BucketChecksums(NamedTuple):
    """Checksums of the buckets of one version that one training rank will send."""

    sums: list[BucketSum]
    """Bucket by bucket."""
    num_bytes: int
    """That it will send to other processes."""


def changed_share(sent: Iterable[SendReport]) -> float | None:
    """Share of the elements that differ from the previous version, over all ranks; None without a codec."""
    counted = [(one.num_changed, one.num_elements) for one in sent]
    num_elements = sum(elements for _, elements in counted)
    return sum(changed for changed, _ in counted) / num_elements if num_elements else None


class WeightSender:
    """One training rank's sender. Its snapshot outlives a transfer group, so that the next group can send it again."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """Start without a snapshot; `device` is what the rank computes on."""
        self._rank = rank
        self._device = device
        self._packs_on = _MAIN_MEMORY
        self._held: dict[str, torch.Tensor] = {}
        self._sent: set[str] = set()
        self._dtype = torch.float32
        self._transfer: Transfer | None = None

    def join(self, group_spec: TransferGroupSpec) -> None:
        """Join a group; the previous one is left.

        Raises:
            WeightSyncError: If a participant does not join in time.
        """
        self.close()
        self._dtype = TORCH_DTYPES[group_spec.transfer.dtype]
        self._sent = {copy.tensor for copy in group_spec.transfer.plan.copies if copy.src_rank == self._rank}
        self._packs_on = self._device if group_spec.on_devices else _MAIN_MEMORY
        self._transfer = group_spec.join(self._rank, self._device)

    def snapshot(self, tensors: Tensors, *, copies: bool) -> None:
        """Hold a version for `send`.

        Args:
            tensors: Name -> this rank's part of it, flat.
            copies: Copy the tensors that this rank sends to the packing device, in the wire dtype, so that training may
                continue at once; otherwise the tensors must not change before `send` has returned.
        """
        mine = {name: sent_part(tensors, name) for name in self._sent}
        if not copies:
            self._held = mine
        for name, tensor in mine.items() if copies else ():
            if name not in self._held:
                self._held[name] = torch.empty(tensor.shape, dtype=self._dtype, device=self._packs_on)
            self._held[name].copy_(tensor.detach())
        if self._packs_on.type == "cuda":
            torch.cuda.synchronize(self._packs_on)  # it is sent from another stream

    def bucket_checksums(self) -> BucketChecksums:
        """Checksums of the snapshot's buckets. Reads all of it; nothing may be sent at the same time."""
        assert self._transfer is not None, "join comes first"
        with on_own_stream(self._packs_on):
            return BucketChecksums(list(self._transfer.bucket_sums(self._held)), self._transfer.num_sent_bytes)

    def send(self, version: int) -> SendReport:
        """Send the snapshot; may run concurrently with training.

        Raises:
            WeightSyncError: If a peer is lost or too late. The group cannot be used any more then.
        """
        assert self._transfer is not None, "join comes first"
        with on_own_stream(self._packs_on):
            traffic = self._transfer.run(version, self._held, {}, wants_sums=True)
        assert traffic.sums is not None, "wants_sums is set"
        return SendReport(traffic.sums, traffic.sent_bytes.total(), traffic.num_elements, traffic.num_changed)

    def close(self) -> None:
        """Leave the group."""
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = None


class _Joined(NamedTuple):
    """A weight receiver's state in one transfer group; `transfers` by tensor-parallel rank."""

    transfer: ShardTransfer
    files: ShardFiles
    threads: ThreadPoolExecutor
    transfers: list[Transfer]


class WeightReceiver:
    """One node's receiver, for all tensor-parallel ranks of the engines there."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._joined: _Joined | None = None

    def join(self, group_spec: TransferGroupSpec, node: str) -> None:
        """Join a group as all ranks of an engine at once; the previous group is left.

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
        """Receive a version into its buffer; returns the folder.

        Raises:
            WeightSyncError: If a peer is lost or too late. The received data must not be used then.
        """
        joined = self._joined
        assert joined is not None, "join comes first"

        def receive(rank: int) -> None:
            previous = joined.files.tensors(version - 1, rank)
            joined.transfers[rank].run(version, {}, joined.files.tensors(version, rank), held=previous)

        list(joined.threads.map(receive, range(len(joined.transfers))))
        return str(joined.transfer.folder(version))

    def close(self) -> None:
        """Leave the group; the files stay."""
        if self._joined is not None:
            for transfer in self._joined.transfers:
                transfer.close()
            self._joined.threads.shutdown(cancel_futures=True)
        self._joined = None


class DeviceReceiver:
    """One engine rank's receiver of device-to-device transfers, in the process of that rank.

    Consumes: messages of the training ranks, or of the previous engine in the relay. Waits for: all participants, then
    each message. Unblocked by: those, a lost peer, or the time-out of a message, which ends the group. It runs in a
    background thread of decoding, and on a GPU on a separate CUDA stream; the data is complete when `receive` returns.
    One version buffer is enough, as in device_memory.py: no version is sent before every engine has acknowledged the
    previous one. In-place updates have none: `receive_in_place` writes every bucket into live parameters of a frozen
    engine.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        """Receive for a rank of an engine that computes on `device`."""
        self._version_buffer: VersionBuffer | None = None
        self._rank = rank
        self._device = device
        self._transfer: Transfer | None = None

    def join(self, group_spec: TransferGroupSpec, replica: int, known: VersionBuffer | None) -> VersionBuffer | None:
        """Join a group as a rank of the `replica`-th receiver; the previous group is left.

        Args:
            group_spec: Of the group.
            replica: Index of this engine among the receivers.
            known: This rank's version buffer, if it has one; reused if it fits.

        Returns:
            The version buffer that versions are received into; None for in-place updates.

        Raises:
            WeightSyncError: If a participant does not join in time, or there is no memory for a version.
        """
        self.close()
        with on_own_stream(self._device):
            transfer, buffer = group_spec.transfer, None
            if not group_spec.is_in_place:
                sizes = transfer.buffers[self._rank]
                buffer = version_buffer_for(known, sizes, TORCH_DTYPES[transfer.dtype], self._device)
            self._transfer = group_spec.join(group_spec.members.engine(replica, self._rank), self._device)
        self._version_buffer = buffer
        return buffer

    def receive(self, version: int) -> None:
        """Receive a version into the version buffer.

        Raises:
            WeightSyncError: If a peer is lost or too late. The received data must not be used then.
        """
        if self._transfer is None or self._version_buffer is None:
            raise WeightSyncError(f"publish v{version}: rank {self._rank} of this engine has joined no transfer group.")
        with on_own_stream(self._device):
            self._transfer.run(version, {}, self._version_buffer.tensors)

    def receive_in_place(self, version: int, sums: Iterable[BucketSum], live: Mapping[str, torch.Tensor]) -> None:
        """Receive a version into live parameters, which nothing may read at the same time.

        Args:
            version: Of the policy.
            sums: Checksums of its buckets.
            live: Name -> flat parameter.

        Raises:
            WeightSyncError: If a bucket is damaged, or a peer is lost or too late. The parameters belong to no version
                then.
        """
        if self._transfer is None:
            raise WeightSyncError(f"publish v{version}: rank {self._rank} of this engine has joined no transfer group.")
        with on_own_stream(self._device):
            self._transfer.run(version, {}, live, expected=ExpectedBuckets(sums))

    @property
    def extra_bytes(self) -> int:
        """Memory of messages; at most one bucket, since an engine only receives and relays."""
        return 0 if self._transfer is None else self._transfer.extra_bytes

    def close(self) -> None:
        """Leave the group; the version buffer stays."""
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = None
