"""Version buffers in the memory of the engines' devices: training ranks write each version there, device to device.

A version buffer holds one version of an engine rank's shard. Each engine rank owns one, allocated once in its own
process on its own device; every training rank that sends to it opens it through a handle (CUDA IPC; on CPU the name of
a file in shared memory). It serves as the staging buffer: the engine verifies it in place, and copies from it under the
freeze. One is enough, because no version is written before all engines in service have acknowledged the previous one or
were fenced.

A handle can be opened once, while its owner lives. The memory is freed when the owner and all processes that opened it
have released it or ended.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
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
from penstock.weights.transport.shared_memory import (
    private_directory,
    reserve,
    split_version_buffer,
    version_buffer_size,
)

CPU = "cpu"
_DEVICE_ARGUMENT, _WAIT_ARGUMENT = 6, 14
"""Arguments of `rebuild_cuda_tensor`: the device index, and whether to wait for an event of the exporting stream."""


_PEER_ACCESS_S = 120.0
"""Longest import of torch and start of CUDA in another process, seconds."""
_ASKS_FOR_PEER_ACCESS = """
import json, sys, torch
uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
def index(name):
    return int(name) if name.isdecimal() else uuids.index(name.removeprefix("GPU-"))
def is_open(one, other):
    return name_is_whole(one) and name_is_whole(other) and torch.cuda.can_device_access_peer(index(one), index(other))
def name_is_whole(name):
    return not name.startswith("MIG-")
print(json.dumps([is_open(*pair) for pair in json.loads(sys.argv[1])]))
"""


class VersionBufferHandle(NamedTuple):
    """Opens a version buffer in another process of the node, once."""

    device: str
    """`device_identity` of the buffer's device."""
    rebuild: bytes
    """Pickled function and arguments that map it."""
    checksum: int
    """CRC-32 of `rebuild`."""


class VersionBuffer:
    """A version buffer in its owner's process.

    Attributes:
        tensors: Name -> flat tensor; changed by other processes.
    """

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the memory.

        Args:
            sizes: Name -> elements of each tensor.
            dtype: Of the parameters.
            device: Of the engine rank.

        Raises:
            WeightSyncError: If torch would allocate memory that cannot be shared, or there is too little.
        """
        size = version_buffer_size(sizes, dtype)
        self._file: Path | None = None
        if device.type == "cuda":
            if refusal := expandable_segments(os.environ):
                raise WeightSyncError(refusal)
            self._flat = torch.zeros(size, dtype=dtype, device=device)
        else:
            # Not torch's own sharing of CPU tensors: after an owner has died, a process that had opened its memory
            # cannot share any of its own.
            self._file = private_directory() / "buffer"
            weakref.finalize(self, shutil.rmtree, self._file.parent, ignore_errors=True)
            try:
                reserve(self._file, size * dtype.itemsize)
            except OSError as error:
                raise WeightSyncError(f"weights: {self._file}: {error.strerror}.") from error
            self._flat = _map_file(str(self._file), size, dtype)
        self.tensors = split_version_buffer(self._flat, sizes)

    def handles(self, num_writers: int) -> list[VersionBufferHandle]:
        """One handle for each writer."""
        _synchronize([self._flat.device])
        identity = device_identity(self._flat.device)
        pickled = [self._rebuild() for _ in range(num_writers)]
        return [VersionBufferHandle(identity, rebuild, zlib.crc32(rebuild)) for rebuild in pickled]

    def _rebuild(self) -> bytes:
        """On a GPU a new one for each handle, since torch counts how often each is opened."""
        if self._file is None:
            return bytes(ForkingPickler.dumps(reduce_tensor(self._flat)))
        return pickle.dumps((_map_file, (str(self._file), self._flat.numel(), self._flat.dtype)))


def version_buffer_for(
    known: VersionBuffer | None, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device
) -> VersionBuffer:
    """The owner's version buffer, if it has these sizes; else a new one."""
    if known is not None:
        held = {name: (tensor.numel(), tensor.dtype) for name, tensor in known.tensors.items()}
        if held == {name: (size, dtype) for name, size in sizes.items()}:
            return known
    return VersionBuffer(sizes, dtype, device)


class OpenedVersionBuffers:
    """The version buffers of one engine, opened by a training rank."""

    def __init__(
        self, handles: Sequence[VersionBufferHandle], sizes: Sequence[Mapping[str, int]], engine_ranks: Collection[int]
    ) -> None:
        """Open the buffers of some ranks.

        Args:
            handles: By rank of the engine.
            sizes: By rank of the engine: name -> elements of each tensor.
            engine_ranks: The ranks to write to.

        Raises:
            WeightSyncError: If one cannot be opened.
        """
        opened = {rank: open_version_buffer(handles[rank], rank) for rank in engine_ranks}
        for rank, buffer in opened.items():
            if buffer.numel() != (planned := version_buffer_size(sizes[rank], buffer.dtype)):
                raise WeightSyncError(
                    f"weights: the version buffer of rank {rank} has {buffer.numel()} elements, the plan needs "
                    f"{planned}. It was made for another model."
                )
        self._devices = {buffer.device for buffer in opened.values()}
        self._tensors = {rank: split_version_buffer(buffer, sizes[rank]) for rank, buffer in opened.items()}

    def tensors(self, version: int, engine_rank: int) -> Mapping[str, torch.Tensor]:  # noqa: ARG002 - one for all versions
        """Name -> flat tensor: where to write the shard of an engine rank. All versions share one buffer."""
        return self._tensors[engine_rank]

    def complete(self) -> None:
        """Wait until other processes can read what was written."""
        _synchronize(self._devices)


def open_version_buffer(handle: VersionBufferHandle, engine_rank: int) -> torch.Tensor:
    """Map a version buffer of another process, as one flat tensor.

    Raises:
        WeightSyncError: If the handle is damaged, its owner has ended, or the device is out of reach.
    """
    where = f"weights: the version buffer of rank {engine_rank} on {handle.device}"
    if zlib.crc32(handle.rebuild) != handle.checksum:
        raise WeightSyncError(f"{where}: its handle was damaged in transfer ({len(handle.rebuild)} bytes).")
    if handle.device != CPU and not torch.cuda.is_available():
        raise WeightSyncError(
            f"{where}: this process has no GPU to reach it from. Set weights.transport=shared_memory."
        )
    try:
        function, arguments = pickle.loads(handle.rebuild)  # noqa: S301 - from a process of this run, through Ray
        if handle.device != CPU:
            arguments = arguments_here(
                arguments, index_here(handle.device, _visible_devices(), torch.cuda.current_device())
            )
        buffer: torch.Tensor = function(*arguments)
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"{where} cannot be opened: {type(error).__name__}: {error}. Its engine has ended, or this process cannot "
            "reach that device from its own. If the engine is up, set weights.transport=shared_memory."
        ) from error
    return buffer


def without_peer_access(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of devices of this node between which memory cannot be mapped, as on L4 and A10G cards.

    This process sees only its own devices, so another one is asked that sees all.

    Args:
        pairs: Two devices each, by their names in `CUDA_VISIBLE_DEVICES`: numbers, or UUIDs with a prefix.

    Raises:
        WeightSyncError: If it cannot be found out.
    """
    apart = [pair for pair in dict.fromkeys(pairs) if pair[0] != pair[1]]
    if not apart:
        return []
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", _ASKS_FOR_PEER_ACCESS, json.dumps(apart)]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_PEER_ACCESS_S, check=True, env=environment
        )
        answers: list[bool] = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise WeightSyncError(f"weights: peer access between GPUs is not known: {type(error).__name__}.") from error
    return [pair for pair, is_open in zip(apart, answers, strict=True) if not is_open]


def index_here(device: str, visible: Sequence[str], current: int) -> int:
    """Device index under which this process opens memory of `device`.

    It differs from the exporter's index: CUDA_VISIBLE_DEVICES numbers the devices of every process separately. Memory
    of a device that this process does not see is mapped from its current device, over peer access.

    Args:
        device: Identity of the exporter's device.
        visible: Identities of the devices of this process, by index.
        current: Index of the device it computes on.
    """
    return visible.index(device) if device in visible else current


def arguments_here(arguments: Sequence[Any], index: int) -> tuple[Any, ...]:
    """Arguments of `rebuild_cuda_tensor` for a device index; no event is waited for: the owner has synchronized."""
    changed = list(arguments)
    changed[_DEVICE_ARGUMENT], changed[_WAIT_ARGUMENT] = index, False
    return tuple(changed)


def device_identity(device: torch.device) -> str:
    """Unique name of a device of the node: its UUID; `cpu` for the CPU."""
    return CPU if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _visible_devices() -> list[str]:
    return [device_identity(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def _synchronize(devices: Collection[torch.device]) -> None:
    """Wait for this process's work on GPUs; writes to another GPU run on the current one, so on that too."""
    indices = {device.index for device in devices if device.type == "cuda"}
    for index in sorted(indices | {torch.cuda.current_device()} if indices else indices):
        torch.cuda.synchronize(index)


def _map_file(path: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    if not Path(path).exists():  # torch would create an empty file
        raise FileNotFoundError(f"{path} is gone")
    return torch.from_file(path, shared=True, size=size, dtype=dtype)
