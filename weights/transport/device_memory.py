"""Slots in the memory of the engines' devices: training ranks write each version there, from device to device.

Each engine rank owns one slot, made once in its own process on its own device; every training rank that has bytes for
it opens it by a handle (CUDA IPC; on CPU the name of a file in shared memory). The slot is what would be staged:
the engine compares it where it is, and copies from it under the freeze. One is enough, because no version is written
before all engines in service have acknowledged the one before, or were fenced.

A handle is good for one opening, while its owner lives. Memory is freed when the owner and all who opened it have let
go of it or ended.
"""

from __future__ import annotations

import os
import pickle
import shutil
import weakref
import zlib
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.transport.allocator import expandable_segments
from penstock.weights.transport.shared_memory import cut_slot, private_directory, reserve, slot_size

CPU = "cpu"
_DEVICE_ARGUMENT, _WAIT_ARGUMENT = 6, 14
"""Of `rebuild_cuda_tensor`: the device's index, and whether to wait for an event of the exporting stream."""


class SlotHandle(NamedTuple):
    """What opens a slot in another process of the node, once.

    Attributes:
        device: `device_identity` of where it is.
        rebuild: Pickled function and arguments that map it.
        checksum: CRC-32 of `rebuild`.
    """

    device: str
    rebuild: bytes
    checksum: int


class DeviceSlot:
    """A slot as its owner has it.

    Attributes:
        buffers: Name -> flat tensor; changed by other processes.
    """

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory.

        Args:
            sizes: By buffer, elements.
            dtype: Of the parameters.
            device: Of the engine rank.

        Raises:
            WeightSyncError: If torch would take it in a way that cannot be shared, or there is too little.
        """
        size = slot_size(sizes, dtype)
        self._file: Path | None = None
        if device.type == "cuda":
            if refusal := expandable_segments(os.environ):
                raise WeightSyncError(refusal)
            self._flat = torch.zeros(size, dtype=dtype, device=device)
        else:
            # Not torch's own sharing of CPU tensors: once an owner has died, who had opened its memory can share none.
            self._file = private_directory() / "slot"
            weakref.finalize(self, shutil.rmtree, self._file.parent, ignore_errors=True)
            try:
                reserve(self._file, size * dtype.itemsize)
            except OSError as error:
                raise WeightSyncError(f"weights: {self._file}: {error.strerror}.") from error
            self._flat = _map_file(str(self._file), size, dtype)
        self.buffers = cut_slot(self._flat, sizes)

    def handles(self, num_writers: int) -> list[SlotHandle]:
        """One for each writer."""
        _synchronize([self._flat.device])
        identity = device_identity(self._flat.device)
        pickled = [self._rebuild() for _ in range(num_writers)]
        return [SlotHandle(identity, rebuild, zlib.crc32(rebuild)) for rebuild in pickled]

    def _rebuild(self) -> bytes:
        """On a GPU a new one each time: torch counts the openings."""
        if self._file is None:
            return bytes(ForkingPickler.dumps(reduce_tensor(self._flat)))
        return pickle.dumps((_map_file, (str(self._file), self._flat.numel(), self._flat.dtype)))


def slot_for(
    known: DeviceSlot | None, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device
) -> DeviceSlot:
    """The slot that an owner has, if it is for these buffers; else a new one."""
    if known is not None:
        held = {name: (buffer.numel(), buffer.dtype) for name, buffer in known.buffers.items()}
        if held == {name: (size, dtype) for name, size in sizes.items()}:
            return known
    return DeviceSlot(sizes, dtype, device)


class OpenedSlots:
    """The slots of one engine, opened by a training rank. It holds one version: the number makes no difference."""

    def __init__(
        self, handles: Sequence[SlotHandle], sizes: Sequence[Mapping[str, int]], engine_ranks: Collection[int]
    ) -> None:
        """Open those of some ranks.

        Args:
            handles: By rank of the engine.
            sizes: Likewise, of each buffer.
            engine_ranks: Those to be written.

        Raises:
            WeightSyncError: If one cannot be opened.
        """
        opened = {rank: open_slot(handles[rank], rank) for rank in engine_ranks}
        for rank, slot in opened.items():
            if slot.numel() != (planned := slot_size(sizes[rank], slot.dtype)):
                raise WeightSyncError(
                    f"weights: the slot of rank {rank} has {slot.numel()} elements, the plan needs "
                    f"{planned}. It was made for another model."
                )
        self._devices = {slot.device for slot in opened.values()}
        self._buffers = {rank: cut_slot(slot, sizes[rank]) for rank, slot in opened.items()}

    def buffers(self, version: int, engine_rank: int) -> Mapping[str, torch.Tensor]:  # noqa: ARG002 - one of all versions
        """Name -> flat tensor: where to write what an engine rank needs of a version."""
        return self._buffers[engine_rank]

    def complete(self) -> None:
        """Wait until what was written is there for other processes."""
        _synchronize(self._devices)


def open_slot(handle: SlotHandle, engine_rank: int) -> torch.Tensor:
    """Map a slot of another process, flat.

    Raises:
        WeightSyncError: If the handle is damaged, its owner has ended, or the device is out of reach.
    """
    where = f"weights: the slot of rank {engine_rank} on {handle.device}"
    if zlib.crc32(handle.rebuild) != handle.checksum:
        raise WeightSyncError(f"{where}: its handle was damaged on the way ({len(handle.rebuild)} bytes).")
    if handle.device != CPU and not torch.cuda.is_available():
        raise WeightSyncError(
            f"{where}: this process has no GPU to reach it from. Set weights.transport=shared_memory."
        )
    try:
        function, arguments = pickle.loads(handle.rebuild)  # noqa: S301 - from a process of this run, over Ray as all
        if handle.device != CPU:
            arguments = arguments_here(
                arguments, index_here(handle.device, _visible_devices(), torch.cuda.current_device())
            )
        slot: torch.Tensor = function(*arguments)
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"{where} cannot be opened: {type(error).__name__}: {error}. Its engine has ended, or this process cannot "
            "reach that device from its own. If the engine is up, set weights.transport=shared_memory."
        ) from error
    return slot


def index_here(device: str, visible: Sequence[str], current: int) -> int:
    """Under which index a process opens memory of `device`.

    That is not the exporter's: CUDA_VISIBLE_DEVICES gives every process numbers of its own. A device that this process
    does not see is mapped from its current one, over peer access.

    Args:
        device: Identity of the exporter's.
        visible: Identities of the devices of this process, by index.
        current: Index of the one it computes on.
    """
    return visible.index(device) if device in visible else current


def arguments_here(arguments: Sequence[Any], index: int) -> tuple[Any, ...]:
    """Arguments of `rebuild_cuda_tensor` for a device index; the owner has waited for its stream, so no event is."""
    changed = list(arguments)
    changed[_DEVICE_ARGUMENT], changed[_WAIT_ARGUMENT] = index, False
    return tuple(changed)


def device_identity(device: torch.device) -> str:
    """What tells a device from all others of the node: its UUID; `cpu` for the CPU."""
    return CPU if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _visible_devices() -> list[str]:
    return [device_identity(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def _synchronize(devices: Collection[torch.device]) -> None:
    """Wait for this process's work on GPUs; of writes to another GPU, the one that they were started from too."""
    indices = {device.index for device in devices if device.type == "cuda"}
    for index in sorted(indices | {torch.cuda.current_device()} if indices else indices):
        torch.cuda.synchronize(index)


def _map_file(path: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    if not Path(path).exists():  # torch would make an empty one
        raise FileNotFoundError(f"{path} is gone")
    return torch.from_file(path, shared=True, size=size, dtype=dtype)
