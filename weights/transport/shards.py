"""Weights within one node, without gathering: training ranks write into slots in the engines' own layout.

A slot is a file in shared memory, one per tensor-parallel rank of an engine, or memory of its device
(device_memory.py). Each training rank copies what the plan gives it from its own memory to its final address there, so
a version is copied twice in all: into the slot while generation goes on, and from the slot into live parameters under
the freeze. Of files two alternate, so a version stays readable while the next one is written, and engines of the node
share them. Padding is zero, as in the engines.

Checksums are sums over addresses (weights/checksum.py): each training rank sums what it reads at the addresses where
the engine must hold it, and the engine sums its live parameters. So they prove content and place, end to end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.checksum import PartialSum, combine_checksums, entry_key, strided_sum
from penstock.weights.config import NUM_SLOTS
from penstock.weights.copies import copy_values
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.engine import EngineSide, TrainingSide
from penstock.weights.layout.strided import strided_box
from penstock.weights.model_config import DTYPE_BYTES, DType
from penstock.weights.planner.plan import Copy, Plan, make_plan
from penstock.weights.transport.device_memory import DeviceSlot, OpenedSlots
from penstock.weights.transport.shared_memory import cut_slot, reserve, slot_size

IN_DEVICE_MEMORY = "device"
"""`WeightManifest.location` of a version that is in the slots of the engine's own devices."""


@dataclass(frozen=True)
class ShardTransfer:
    """Everything a training rank needs to write its part of each version. Made once, by the driver.

    Attributes:
        plan: Who copies what.
        buffers: By engine rank: name -> size in elements.
        dtype: Of the wire, and of the engine's parameters.
        directory: Where the files are, in shared memory; None: the slots are in device memory.
        num_slots: Versions that the files hold. With one, no engine may read a version when the next is written.
    """

    plan: Plan
    buffers: tuple[Mapping[str, int], ...]
    dtype: DType
    directory: str | None
    num_slots: int = NUM_SLOTS

    @classmethod
    def between(
        cls,
        training: TrainingSide,
        engine: EngineSide,
        dtype: DType,
        directory: str | None,
        training_at: Sequence[str] = (),
        engine_at: Sequence[str] = (),
    ) -> ShardTransfer:
        """Plan the transfer.

        Args:
            training: How the trainer holds the model.
            engine: How an engine does.
            dtype: Of the wire.
            directory: Where the files are to be, if there are any.
            training_at: Node of each training rank; its device, if there is no directory.
            engine_at: Of each rank of the engine: what several training ranks have is sent from where it is nearest,
                and what the only one on its device has stays there.

        Raises:
            WeightSyncError: If the training side lacks something that the engine needs.
        """
        resident = resident_ranks(training_at, engine_at) if directory is None else {}
        try:
            plan = make_plan(
                training.layout(),
                engine.layout,
                DTYPE_BYTES[dtype],
                resident=resident,
                source_nodes=dict(enumerate(training_at)),
                destination_nodes=dict(enumerate(engine_at)),
            )
        except WeightSyncError as error:
            layouts = f"Training layout: {training.words}. Engine layout: {engine.words}."
            raise WeightSyncError(f"{error} {layouts}") from error
        return cls(plan, engine.layout.buffers, dtype, directory)

    def folder(self, version: int) -> Path:
        """Where a version's files are."""
        assert self.directory is not None, "slots in device memory have no files"
        return Path(self.directory) / f"slot{version % self.num_slots}"

    def manifest(self, version: int, parts: list[PartialSum]) -> WeightManifest:
        """What the engines are told, once every training rank has written its part."""
        sums: Counter[tuple[int, str]] = Counter()
        for engine_rank, buffer, checksum in parts:
            sums[engine_rank, buffer] += checksum
        entries = tuple(
            TensorEntry(name, self.dtype, (size,), sums[rank, name] % 2**64, rank)
            for rank, sizes in enumerate(self.buffers)
            for name, size in sizes.items()
        )
        return WeightManifest(
            version=version,
            location=IN_DEVICE_MEMORY if self.directory is None else str(self.folder(version)),
            entries=entries,
            num_bytes=sum(sum(sizes.values()) for sizes in self.buffers) * DTYPE_BYTES[self.dtype],
            checksum=combine_checksums((entry_key(entry.rank, entry.name), entry.checksum) for entry in entries),
            num_shards=len(self.buffers),
        )


def resident_ranks(training_at: Sequence[str], engine_at: Sequence[str]) -> dict[int, int]:
    """Engine rank -> the only training rank on its device: what that one holds need not be sent."""
    return {rank: training_at.index(device) for rank, device in enumerate(engine_at) if training_at.count(device) == 1}


class ShardFiles:
    """Slots as files, mapped as they are needed; the engines of a node share them."""

    def __init__(self, transfer: ShardTransfer) -> None:
        """Make the files, if no other process has.

        Raises:
            WeightSyncError: If shared memory is too small for them.
        """
        self._transfer = transfer
        self._dtype = TORCH_DTYPES[transfer.dtype]
        self._mapped: dict[tuple[Path, int], dict[str, torch.Tensor]] = {}
        for slot in range(transfer.num_slots):
            for engine_rank, sizes in enumerate(transfer.buffers):
                _reserve(transfer, slot, engine_rank, slot_size(sizes, self._dtype) * self._dtype.itemsize)

    def buffers(self, version: int, engine_rank: int) -> Mapping[str, torch.Tensor]:
        """Name -> flat tensor: what an engine rank needs of a version; it replaces the version before the last one."""
        folder = self._transfer.folder(version)
        buffers = self._mapped.get((folder, engine_rank))
        if buffers is None:
            sizes = self._transfer.buffers[engine_rank]
            buffers = self._mapped[folder, engine_rank] = _map(folder, engine_rank, sizes, self._dtype)
        return buffers

    def complete(self) -> None:
        """A copy into main memory is there when the call that makes it returns."""


class ShardWriter:
    """One training rank's part of every publish.

    Attributes:
        progress: How far it is, for messages; may be read by another thread.
    """

    def __init__(self, transfer: ShardTransfer, rank: int, slots: ShardFiles | OpenedSlots) -> None:
        self.progress = "not begun"
        self._dtype = TORCH_DTYPES[transfer.dtype]
        self._copies = copies_of(transfer, rank)
        self._buckets = [[copy for copy in bucket if copy.src_rank == rank] for bucket in transfer.plan.buckets]
        self._slots = slots

    @torch.no_grad()
    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's elements into the slots of `version`; they are there when it returns.

        Args:
            version: Replaces the version before the last one; in device memory the last one.
            tensors: Name -> what this rank holds of it, flat; cast to the wire dtype here.
        """
        for number, bucket in enumerate(self._buckets, start=1):
            self.progress = f"v{version}, bucket {number} of {len(self._buckets)}"
            for copy in bucket:
                buffer = self._slots.buffers(version, copy.dst_rank)[copy.destination.buffer]
                target = strided_box(buffer, copy.shape, copy.destination)
                copy_values(target, strided_box(tensors[copy.tensor], copy.shape, copy.source))
        self.progress = f"v{version}, all buckets begun"
        self._slots.complete()
        self.progress = f"v{version}, checksums"

    @torch.no_grad()
    def sums(self, tensors: Mapping[str, torch.Tensor]) -> list[PartialSum]:
        """What this rank's elements add to the checksums, read where they come from."""
        return shard_sums(self._copies, self._dtype, tensors)


def copies_of(transfer: ShardTransfer, rank: int) -> list[Copy]:
    """What one training rank sends."""
    return [copy for copy in transfer.plan.copies if copy.src_rank == rank]


@torch.no_grad()
def shard_sums(copies: Iterable[Copy], dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> list[PartialSum]:
    """What the elements of these copies add to the checksums of the engines' parameters, in the wire dtype."""
    parts = []
    for copy in copies:
        sent = strided_box(tensors[copy.tensor], copy.shape, copy.source).to(dtype)
        checksum = strided_sum(sent, copy.destination.offset, copy.destination.strides)
        parts.append(PartialSum(copy.dst_rank, copy.destination.buffer, checksum))
    return parts


def read_shard(manifest: WeightManifest, rank: int, slot: DeviceSlot | None) -> Iterator[tuple[str, torch.Tensor]]:
    """What one engine rank needs of a version, where it is: buffer name and flat tensor. Nothing is copied.

    Args:
        manifest: Of the version.
        rank: Of the engine.
        slot: Of this rank in device memory, if it has one.

    Raises:
        WeightSyncError: If the slot is gone, or is for other buffers.
    """
    entries = [entry for entry in manifest.entries if entry.rank == rank]
    where = f"publish v{manifest.version}"
    if manifest.location == IN_DEVICE_MEMORY:
        if slot is None:
            raise WeightSyncError(
                f"{where}: it was written into device memory for rank {rank}, which has none: its process began later."
            )
        for entry in entries:
            if entry.name not in slot.buffers:
                raise WeightSyncError(f"{where}: the slot of rank {rank} has no buffer {entry.name}. Other model?")
            yield entry.name, slot.buffers[entry.name]
        return
    folder = Path(manifest.location)
    if not _file(folder, rank).exists():
        raise WeightSyncError(
            f"{where}: {_file(folder, rank)} is not there. The engine is on another node than the trainer. Set "
            "weights.transport=auto."
        )
    sizes = {entry.name: entry.shape[0] for entry in entries}
    yield from _map(folder, rank, sizes, TORCH_DTYPES[entries[0].dtype]).items()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}"


def _map(folder: Path, rank: int, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Map a file and cut it into its buffers."""
    size = slot_size(sizes, dtype)
    return cut_slot(torch.from_file(str(_file(folder, rank)), shared=True, size=size, dtype=dtype), sizes)


def _reserve(transfer: ShardTransfer, slot: int, engine_rank: int, num_bytes: int) -> None:
    file = _file(transfer.folder(slot), engine_rank)
    try:
        reserve(file, num_bytes)
    except OSError as error:
        free = os.statvfs(file.parent)
        raise WeightSyncError(
            f"weights: {file.parent} has {free.f_bavail * free.f_frsize >> 20} MiB free, one shard of the policy "
            f"needs {num_bytes >> 20} MiB, {transfer.num_slots} of every shard are kept ({error.strerror}). Give "
            "the machine or container more of it (docker: --shm-size)"
            + (", or set weights.staging=bucket, which takes half." if transfer.num_slots > 1 else ".")
        ) from error
