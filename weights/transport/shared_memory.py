"""Memory that processes of one node share: folders, version buffers, and whole versions as one safetensors file.

A version buffer holds one version of an engine rank's shard: its flat tensors one after the other in one piece of
memory. There are two kinds: files that a node shares (shards.py) and memory of the engine's device (device_memory.py).
They differ only in how they are created and opened; writing and verifying are the same.

A gathered version is a file of HF-named tensors that every engine maps. It exists until all engines have acknowledged a
newer version or were fenced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.checksum import combine_checksums, entry_key, tensor_checksum
from penstock.weights.dtypes import TORCH_DTYPES

_PREFIX = "penstock-weights-"
ALIGNMENT_BYTES = 64
LARGE_BYTES = 64 << 10
_PAGE_BYTES = 4096
_LARGE_START_BYTES = _PAGE_BYTES // 2
"""Offset in a page. Memory that torch allocates for a large tensor starts shortly after a page boundary. If the tensors
of a version buffer started there too, or at a page boundary, memcpy would be slow into one of the two (copies.py)."""


def default_directory() -> Path:
    """`/dev/shm` if it exists (Linux), else the temporary folder."""
    shm = Path("/dev/shm")  # noqa: S108 - this is the shared-memory file system, files get unguessable names
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def private_directory(parent: str | None = None) -> Path:
    """A new folder for this process, in shared memory if no parent is given.

    Its name tells whose it is: `penstock-weights-<pid>-<start of the process>-<machine>-<random>`. So
    `remove_directories_of` finds it, and `remove_abandoned_directories` sees whether its process still runs. Folders
    that killed processes have left in the same place are removed first, since they may take all of its memory.
    """
    place, pid = Path(parent or default_directory()), os.getpid()
    remove_abandoned_directories(place)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{pid}-{_start_ticks(pid)}-{_machine()}-", dir=place))


def remove_abandoned_directories(place: Path) -> None:
    """Remove the folders in `place` whose processes were killed.

    A process is told by its pid and its start, since pids are used again. Folders of other machines, or of containers
    with pids of their own, are left alone: whether their processes run cannot be seen from here.
    """
    if not (machine := _machine()):
        return
    for folder in place.glob(f"{_PREFIX}*-*-{machine}-*"):
        pid, start = folder.name.removeprefix(_PREFIX).split("-")[:2]
        if pid.isdecimal() and start != str(_start_ticks(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


@cache
def _machine() -> str:
    """Name of this boot of this machine and of the pids that this process sees: 8 hex digits, or empty if not Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return f"{zlib.crc32(f'{boot} {namespace}'.encode()):08x}"


def _start_ticks(pid: int) -> int:
    """Start of a process, in clock ticks since the boot of the machine; -1 if it does not run (any more)."""
    try:
        # The name of the program, in brackets, may hold spaces. The state follows it and, 19 places later, the start.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])


def remove_directories_of(pids: Iterable[int], parent: str | None = None) -> None:
    """Remove the folders that killed processes of this machine have left in shared memory, or in `parent`."""
    for pid in pids:
        for directory in {default_directory(), Path(parent or default_directory())}:
            for folder in directory.glob(f"{_PREFIX}{pid}-*-{_machine()}-*"):
                shutil.rmtree(folder, ignore_errors=True)


def reserve(file: Path, num_bytes: int) -> None:
    """Create a file and allocate its memory now: a page that is missing later would kill the process (SIGBUS).

    Raises:
        OSError: If there is too little.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        os.posix_fallocate(opened.fileno(), 0, num_bytes)


def write_version(
    tensors: Iterable[tuple[str, torch.Tensor]], version: int, dtype: str, directory: Path
) -> WeightManifest:
    """Write one version as a file that every engine on this node can map.

    Args:
        tensors: HF name and full tensor, each once; cast to `dtype` (the wire dtype) here.
        version: Policy version of these weights.
        dtype: `float32` or `bfloat16`.
        directory: A folder in shared memory, private to the run.

    Returns:
        The manifest; its checksum is over the bytes as written.
    """
    wire = {name: tensor.detach().to("cpu", TORCH_DTYPES[dtype]).contiguous() for name, tensor in tensors}
    entries = tuple(
        TensorEntry(name, dtype, tuple(tensor.shape), tensor_checksum(tensor)) for name, tensor in wire.items()
    )
    path = directory / f"v{version}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(wire, partial)
    partial.rename(path)
    return WeightManifest(
        version=version,
        location=str(path),
        entries=entries,
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in wire.values()),
        checksum=combine_checksums((entry_key(0, entry.name), entry.checksum) for entry in entries),
    )


def read_version(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Map a version and yield its tensors in manifest order; nothing is copied until a tensor is used.

    Raises:
        WeightSyncError: If the file does not exist or lacks tensors of the manifest.
    """
    path = Path(manifest.location)
    if not path.exists():
        raise WeightSyncError(
            f"publish v{manifest.version}: {path} does not exist. The engine is on another node than trainer rank 0, "
            "or the version was already replaced. Set weights.transport=auto."
        )
    with safe_open(path, framework="pt", device="cpu") as file:
        missing = [entry.name for entry in manifest.entries if entry.name not in set(file.keys())]
        if missing:
            raise WeightSyncError(
                f"publish v{manifest.version}: {path} lacks {len(missing)} tensors, first {missing[0]}"
            )
        for entry in manifest.entries:
            yield entry.name, file.get_tensor(entry.name)


def version_buffer_size(sizes: Mapping[str, int], dtype: torch.dtype) -> int:
    """Elements of a version buffer for tensors of these sizes, padding included."""
    return _starts(sizes, dtype)[-1]


def split_version_buffer(flat: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Split a version buffer, which starts on a page, into its tensors, each on a cache line; large ones mid-page."""
    starts = _starts(sizes, flat.dtype)
    return {name: flat[start : start + size] for (name, size), start in zip(sizes.items(), starts, strict=False)}


def _starts(sizes: Mapping[str, int], dtype: torch.dtype) -> list[int]:
    """Offset of each tensor, and the total size, in elements."""
    starts, end = [], 0
    for size in sizes.values():
        num_bytes = size * dtype.itemsize
        if num_bytes >= LARGE_BYTES:
            end += (_LARGE_START_BYTES - end) % _PAGE_BYTES
        starts.append(end // dtype.itemsize)
        end += num_bytes + -num_bytes % ALIGNMENT_BYTES
    return [*starts, end // dtype.itemsize]
