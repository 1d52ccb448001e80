"""Weights within one node, without gathering: training ranks write version buffers in the engines' own layout.

A version buffer is a file in shared memory, one per tensor-parallel rank of an engine, or memory of its device
(device_memory.py). Each training rank copies its part of the plan from its own memory to the final addresses there, so
a version is copied twice in total: into the buffer during generation, and from the buffer into live parameters under
the freeze. Two files alternate, so a version stays readable while the next one is written; the engines of a node share
them. Padding is zero, as in the engines.

Checksums are sums over addresses (weights/checksum.py): each training rank sums the values it reads at the addresses
where the engine must hold them, and the engine sums its live parameters. So they verify content and place, end to end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.checksum import PartialSum, combine_checksums, entry_key, strided_sum
from penstock.weights.config import NUM_BUFFERS
from penstock.weights.copies import copy_values
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.algebra import strided_box
from penstock.weights.layout.derived import derived_value, with_derived
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.model_config import DTYPE_BYTES, DType
from penstock.weights.planner.plan import Plan, PlannedCopy, make_plan
from penstock.weights.transport.device_memory import OpenedVersionBuffers, VersionBuffer
from penstock.weights.transport.shared_memory import reserve, split_version_buffer, version_buffer_size

IN_DEVICE_MEMORY = "device"
"""`WeightManifest.location` of a version in the buffers of the engine's own devices."""


@dataclass(frozen=True)
class ShardTransfer:
    """Everything a training rank needs to write its part of each version. Made once, by the driver."""

    plan: Plan
    """The copies of each training rank."""
    buffers: tuple[Mapping[str, int], ...]
    """By engine rank: name -> size in elements."""
    dtype: DType
    """Of the wire, and of the engine's parameters."""
    directory: str | None
    """Folder of the files, in shared memory; None: the version buffers are in device memory."""
    num_buffers: int = NUM_BUFFERS
    """Version buffers per engine rank. With one, no engine may still read a version when the next is written."""

    @classmethod
    def between(
        cls,
        training: TrainingSharding,
        engine: EngineLayout,
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
            directory: Folder of the files, if there are any.
            training_at: Node of each training rank; its device, if there is no directory.
            engine_at: The same of each engine rank. Of several training ranks that hold an element, the nearest one
                sends it; the only training rank on an engine rank's device sends it nothing, since it copies locally.

        Raises:
            WeightSyncError: If the training ranks lack a tensor that the engine needs.
        """
        resident = resident_ranks(training_at, engine_at) if directory is None else {}
        try:
            plan = make_plan(
                with_derived(training.layout(), engine.layout.shards),
                engine.layout,
                DTYPE_BYTES[dtype],
                resident=resident,
                source_nodes=dict(enumerate(training_at)),
                destination_nodes=dict(enumerate(engine_at)),
            )
        except WeightSyncError as error:
            layouts = f"Training layout: {training.description}. Engine layout: {engine.description}."
            raise WeightSyncError(f"{error} {layouts}") from error
        return cls(plan, engine.layout.buffers, dtype, directory)

    def folder(self, version: int) -> Path:
        """Folder of a version's files."""
        assert self.directory is not None, "version buffers in device memory have no files"
        return Path(self.directory) / f"buffer{version % self.num_buffers}"

    def manifest(self, version: int, parts: list[PartialSum]) -> WeightManifest:
        """The manifest for the engines, from the checksums of all training ranks."""
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


def manifest_of(manifest: WeightManifest, shards: range) -> WeightManifest:
    """The manifest for an engine that is the ranks `shards` of the layout that the version was written in."""
    entries = tuple(
        replace(entry, rank=entry.rank - shards.start) for entry in manifest.entries if entry.rank in shards
    )
    return replace(
        manifest,
        entries=entries,
        checksum=combine_checksums((entry_key(entry.rank, entry.name), entry.checksum) for entry in entries),
        num_shards=len(shards),
        first_shard=shards.start,
    )


def resident_ranks(training_at: Sequence[str], engine_at: Sequence[str]) -> dict[int, int]:
    """Engine rank -> the only training rank on its device, whose elements need not be sent."""
    return {rank: training_at.index(device) for rank, device in enumerate(engine_at) if training_at.count(device) == 1}


class ShardFiles:
    """Version buffers as files, mapped on first use; the engines of a node share them."""

    def __init__(self, transfer: ShardTransfer) -> None:
        """Create the files, unless another process has.

        Raises:
            WeightSyncError: If shared memory is too small for them.
        """
        self._transfer = transfer
        self._dtype = TORCH_DTYPES[transfer.dtype]
        self._mapped: dict[tuple[Path, int], dict[str, torch.Tensor]] = {}
        for version in range(transfer.num_buffers):
            for engine_rank, sizes in enumerate(transfer.buffers):
                _reserve(transfer, version, engine_rank, version_buffer_size(sizes, self._dtype) * self._dtype.itemsize)

    def tensors(self, version: int, engine_rank: int) -> Mapping[str, torch.Tensor]:
        """Name -> flat tensor: an engine rank's shard of a version, in the buffer of `version - num_buffers`."""
        folder = self._transfer.folder(version)
        tensors = self._mapped.get((folder, engine_rank))
        if tensors is None:
            sizes = self._transfer.buffers[engine_rank]
            tensors = self._mapped[folder, engine_rank] = _map(folder, engine_rank, sizes, self._dtype)
        return tensors

    def complete(self) -> None:
        """Does nothing: a copy into main memory is complete when its call returns."""


class ShardWriter:
    """One training rank's part of every publish.

    Attributes:
        progress: How far it is, for messages; may be read by another thread.
    """

    def __init__(self, transfer: ShardTransfer, rank: int, version_buffers: ShardFiles | OpenedVersionBuffers) -> None:
        self.progress = "not begun"
        self._dtype = TORCH_DTYPES[transfer.dtype]
        self._copies = copies_of(transfer, rank)
        self._buckets = [[copy for copy in bucket if copy.src_rank == rank] for bucket in transfer.plan.buckets]
        self._version_buffers = version_buffers

    @torch.no_grad()
    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's elements into the buffers of `version`; other processes can read them when it returns.

        Args:
            version: Overwrites the version before the last one; in device memory the last one.
            tensors: Name -> this rank's part of it, flat; cast to the wire dtype here.
        """
        for number, bucket in enumerate(self._buckets, start=1):
            self.progress = f"v{version}, bucket {number} of {len(self._buckets)}"
            for copy in bucket:
                shard = self._version_buffers.tensors(version, copy.dst_rank)
                target = strided_box(shard[copy.destination.buffer], copy.shape, copy.destination)
                copy_values(target, strided_box(sent_part(tensors, copy.tensor), copy.shape, copy.source))
        self.progress = f"v{version}, all buckets begun"
        self._version_buffers.complete()
        self.progress = f"v{version}, checksums"

    @torch.no_grad()
    def sums(self, tensors: Mapping[str, torch.Tensor]) -> list[PartialSum]:
        """This rank's contributions to the checksums, computed from its own tensors."""
        return shard_sums(self._copies, self._dtype, tensors)


def sent_part(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A rank's part of a tensor that is sent: one of `tensors`, or derived from one."""
    return tensors[name] if name in tensors else derived_value(tensors, name)


def copies_of(transfer: ShardTransfer, rank: int) -> list[PlannedCopy]:
    """The copies that one training rank sends."""
    return [copy for copy in transfer.plan.copies if copy.src_rank == rank]


@torch.no_grad()
def shard_sums(
    copies: Iterable[PlannedCopy], dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]
) -> list[PartialSum]:
    """Contributions of these copies to the checksums of the engines' parameters, in the wire dtype."""
    parts = []
    for copy in copies:
        sent = strided_box(sent_part(tensors, copy.tensor), copy.shape, copy.source).to(dtype)
        checksum = strided_sum(sent, copy.destination.offset, copy.destination.strides)
        parts.append(PartialSum(copy.dst_rank, copy.destination.buffer, checksum))
    return parts


def read_shard(
    manifest: WeightManifest, rank: int, device_buffer: VersionBuffer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """One engine rank's shard of a version: buffer name and flat tensor, a view of the version buffer.

    Args:
        manifest: Of the version.
        rank: Of the engine.
        device_buffer: This rank's buffer in device memory, if it has one.

    Raises:
        WeightSyncError: If the version buffer does not exist, or was made for other tensors.
    """
    entries = [entry for entry in manifest.entries if entry.rank == rank]
    where = f"publish v{manifest.version}"
    if manifest.location == IN_DEVICE_MEMORY:
        if device_buffer is None:
            raise WeightSyncError(
                f"{where}: it was written into device memory, but rank {rank} has no version buffer: its process "
                "started after that."
            )
        for entry in entries:
            if entry.name not in device_buffer.tensors:
                raise WeightSyncError(
                    f"{where}: the version buffer of rank {rank} has no tensor {entry.name}. Is it of another model?"
                )
            yield entry.name, device_buffer.tensors[entry.name]
        return
    folder, rank = Path(manifest.location), manifest.first_shard + rank
    if not _file(folder, rank).exists():
        raise WeightSyncError(
            f"{where}: {_file(folder, rank)} does not exist. The engine is on another node than the trainer. Set "
            "weights.transport=auto."
        )
    sizes, dtype = tuple((entry.name, entry.shape[0]) for entry in entries), TORCH_DTYPES[entries[0].dtype]
    yield from _kept_mapping(folder, rank, _file(folder, rank).stat().st_ino, sizes, dtype).items()


@lru_cache(maxsize=NUM_BUFFERS)
def _kept_mapping(
    folder: Path, rank: int, _inode: int, sizes: tuple[tuple[str, int], ...], dtype: torch.dtype
) -> Mapping[str, torch.Tensor]:
    """Map a version buffer, which the engine reads again every `NUM_BUFFERS` versions; another inode is another file.

    To fault the pages of a new mapping in and to free them takes as long as two copies of the version, and the second
    half of that happened while the engine was frozen.
    """
    return _map(folder, rank, dict(sizes), dtype)


def forget_mappings() -> None:
    """Unmap the version buffers that this engine rank has read: memory of deleted files is only freed then."""
    _kept_mapping.cache_clear()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}"


def _map(folder: Path, rank: int, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Map a file and split it into its tensors."""
    size = version_buffer_size(sizes, dtype)
    return split_version_buffer(torch.from_file(str(_file(folder, rank)), shared=True, size=size, dtype=dtype), sizes)


def _reserve(transfer: ShardTransfer, version: int, engine_rank: int, num_bytes: int) -> None:
    file = _file(transfer.folder(version), engine_rank)
    try:
        reserve(file, num_bytes)
    except OSError as error:
        free = os.statvfs(file.parent)
        raise WeightSyncError(
            f"weights: {file.parent} has {free.f_bavail * free.f_frsize >> 20} MiB free, but one shard of the policy "
            f"needs {num_bytes >> 20} MiB, and {transfer.num_buffers} versions of every shard are kept "
            f"({error.strerror}). Give the machine or container more shared memory (docker: --shm-size)"
            + (", or set weights.staging=bucket, which needs half." if transfer.num_buffers > 1 else ".")
        ) from error
