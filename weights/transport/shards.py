"""Weights within one node, without gathering: training ranks write into shared memory in the engines' own layout.

There is one file per tensor-parallel rank of an engine and slot. Each training rank copies what the plan gives it from
its own memory to its final address there, so a version is copied twice in all: into the file while generation goes on,
and from the file into live parameters under the freeze. Two slots alternate, so a version stays readable while the
next one is written. Engines of the node share the files. Padding is zero, as in the engines.

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
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.engine import EngineSide, TrainingSide
from penstock.weights.model_config import DTYPE_BYTES, DType
from penstock.weights.planner.plan import Copy, Plan, make_plan
from penstock.weights.strided import strided_box

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ShardTransfer:
    """Everything a training rank needs to write its part of each version. Made once, by the driver.

    Attributes:
        plan: Who copies what.
        buffers: By engine rank: name -> size in elements.
        dtype: Of the wire, and of the engine's parameters.
        directory: Where the files are, in shared memory.
    """

    plan: Plan
    buffers: tuple[Mapping[str, int], ...]
    dtype: DType
    directory: str

    @classmethod
    def between(
        cls,
        training: TrainingSide,
        engine: EngineSide,
        dtype: DType,
        directory: str,
        training_nodes: Sequence[str] = (),
        engine_node: str | None = None,
    ) -> ShardTransfer:
        """Plan the transfer.

        Args:
            training: How the trainer holds the model.
            engine: How an engine does.
            dtype: Of the wire.
            directory: Where the files are to be.
            training_nodes: Node of each training rank: those on `engine_node` send what others have too.
            engine_node: Where it goes first.

        Raises:
            WeightSyncError: If the layout of a tensor is not known on one of the sides.
        """
        destination = engine.layout(training.tensors)
        plan = make_plan(
            training.layout(),
            destination,
            DTYPE_BYTES[dtype],
            source_nodes=dict(enumerate(training_nodes)),
            destination_nodes=dict.fromkeys(range(destination.num_ranks), engine_node) if engine_node else {},
        )
        return cls(plan, destination.buffers, dtype, directory)

    def folder(self, version: int) -> Path:
        """Where a version's files are."""
        return Path(self.directory) / f"slot{version % NUM_SLOTS}"

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
            location=str(self.folder(version)),
            entries=entries,
            num_bytes=sum(sum(sizes.values()) for sizes in self.buffers) * DTYPE_BYTES[self.dtype],
            checksum=combine_checksums((entry_key(entry.rank, entry.name), entry.checksum) for entry in entries),
            num_shards=len(self.buffers),
        )


class ShardFiles:
    """The files of a transfer on one node, mapped as they are needed."""

    def __init__(self, transfer: ShardTransfer) -> None:
        """Make the files, if no other process has.

        Raises:
            WeightSyncError: If shared memory is too small for them.
        """
        self._transfer = transfer
        self._dtype = TORCH_DTYPES[transfer.dtype]
        self._mapped: dict[tuple[Path, int], dict[str, torch.Tensor]] = {}
        for slot in range(NUM_SLOTS):
            for engine_rank, sizes in enumerate(transfer.buffers):
                _reserve(_file(transfer.folder(slot), engine_rank), _num_elements(sizes, self._dtype), self._dtype)

    def buffers(self, version: int, engine_rank: int) -> Mapping[str, torch.Tensor]:
        """Name -> flat tensor: what an engine rank needs of a version; it replaces the version before the last one."""
        folder = self._transfer.folder(version)
        buffers = self._mapped.get((folder, engine_rank))
        if buffers is None:
            sizes = self._transfer.buffers[engine_rank]
            buffers = self._mapped[folder, engine_rank] = _map(folder, engine_rank, sizes, self._dtype)
        return buffers


class ShardWriter:
    """One training rank's part of every publish."""

    def __init__(self, transfer: ShardTransfer, rank: int) -> None:
        """Make the files, if no other rank has.

        Raises:
            WeightSyncError: If shared memory is too small for them.
        """
        self._dtype = TORCH_DTYPES[transfer.dtype]
        self._copies = [copy for copy in transfer.plan.copies if copy.src_rank == rank]
        self._files = ShardFiles(transfer)

    @torch.no_grad()
    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's elements into the files of `version`.

        Args:
            version: Replaces the version before the last one.
            tensors: Name -> what this rank holds of it, flat; cast to the wire dtype here.
        """
        for copy in self._copies:
            buffer = self._files.buffers(version, copy.dst_rank)[copy.destination.buffer]
            target = strided_box(buffer, copy.shape, copy.destination)
            target.copy_(strided_box(tensors[copy.tensor], copy.shape, copy.source))

    @torch.no_grad()
    def sums(self, tensors: Mapping[str, torch.Tensor]) -> list[PartialSum]:
        """What this rank's elements add to the checksums, read where they come from."""
        return shard_sums(self._copies, self._dtype, tensors)


@torch.no_grad()
def shard_sums(copies: Iterable[Copy], dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> list[PartialSum]:
    """What the elements of these copies add to the checksums of the engines' parameters, in the wire dtype."""
    parts = []
    for copy in copies:
        sent = strided_box(tensors[copy.tensor], copy.shape, copy.source).to(dtype)
        checksum = strided_sum(sent, copy.destination.offset, copy.destination.strides)
        parts.append(PartialSum(copy.dst_rank, copy.destination.buffer, checksum))
    return parts


def read_shard(manifest: WeightManifest, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Map what one engine rank needs of a version: buffer name and flat tensor. Nothing is copied.

    Raises:
        WeightSyncError: If the file is gone.
    """
    entries = [entry for entry in manifest.entries if entry.rank == rank]
    folder = Path(manifest.location)
    if not _file(folder, rank).exists():
        raise WeightSyncError(
            f"publish v{manifest.version}: {_file(folder, rank)} is not there. The engine is on another node than the "
            "trainer. Set weights.transport=auto."
        )
    sizes = {entry.name: entry.shape[0] for entry in entries}
    yield from _map(folder, rank, sizes, TORCH_DTYPES[entries[0].dtype]).items()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}"


def _map(folder: Path, rank: int, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Map a file and cut it into its buffers, each on a cache line of its own."""
    flat = torch.from_file(str(_file(folder, rank)), shared=True, size=_num_elements(sizes, dtype), dtype=dtype)
    buffers, start = {}, 0
    for name, size in sizes.items():
        buffers[name] = flat[start : start + size]
        start += _aligned(size, dtype)
    return buffers


def _num_elements(sizes: Mapping[str, int], dtype: torch.dtype) -> int:
    return sum(_aligned(size, dtype) for size in sizes.values())


def _aligned(size: int, dtype: torch.dtype) -> int:
    step = ALIGNMENT_BYTES // dtype.itemsize
    return -(-size // step) * step


def _reserve(file: Path, num_elements: int, dtype: torch.dtype) -> None:
    """Take the memory now: a page that is missing later would end the process without a word."""
    num_bytes = num_elements * dtype.itemsize
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        try:
            os.posix_fallocate(opened.fileno(), 0, num_bytes)
        except OSError as error:
            free = os.statvfs(file.parent)
            raise WeightSyncError(
                f"weights: {file.parent} has {free.f_bavail * free.f_frsize >> 20} MiB free, one shard of the policy "
                f"needs {num_bytes >> 20} MiB, {NUM_SLOTS} versions of every shard are kept ({error.strerror}). Give "
                "the machine or container more of it (docker: --shm-size)."
            ) from error
