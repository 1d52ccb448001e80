"""Staging: a version is fetched and verified for one engine rank while that rank continues decoding.

Consumes: the shard in a version buffer, the whole tensors of a file, or adapters (weights/transport/adapters.py).
Waits for: the copy of data in shared memory to the device if that is a GPU, on a separate CUDA stream, and its
comparison with the manifest, in a thread of the worker (rollout/engines/vllm/channel.py). Data that training ranks have
written into device memory is not copied. Only then are running requests frozen: a damaged version harms nothing, and
the freeze lasts for one copy within the device, or for loading the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from penstock.dataflow.errors import WeightSyncError, boundary
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.checksum import check_received
from penstock.weights.transport.adapters import BaseWeights, entries_of
from penstock.weights.transport.device_memory import VersionBuffer
from penstock.weights.transport.in_place import ShardChunks
from penstock.weights.transport.shards import read_shard
from penstock.weights.transport.shared_memory import read_version


class Staged(NamedTuple):
    """One version for one tensor-parallel rank."""

    values: dict[str, torch.Tensor] | ShardChunks
    """Buffer name -> flat values, held until the swap; or chunks that are applied in place."""
    entries: tuple[TensorEntry, ...]
    """Expected live parameters of this rank after the swap."""


def stage(
    manifest: WeightManifest,
    rank: int,
    device: torch.device,
    base: BaseWeights,
    live: Mapping[str, torch.Tensor],
    device_buffer: VersionBuffer | None,
    bucket_bytes: int | None = None,
) -> Staged:
    """Fetch a version and compare it with its manifest.

    Args:
        manifest: The version.
        rank: Of the engine.
        device: Holds the version until the swap: the engine's device, or the CPU to save device memory.
        base: Weights that adapters are added to.
        live: Parameters by name; only read.
        device_buffer: This rank's version buffer in device memory, if it has one.
        bucket_bytes: Hold at most this much of a shard, which is then applied in place under the freeze (in_place.py);
            None: hold all of it.

    Raises:
        WeightSyncError: If the received bytes differ from the manifest.
    """
    with boundary(WeightSyncError, f"publish v{manifest.version}: staging"), on_own_stream(device):
        if manifest.adapters is not None:
            merged = base.merge(manifest, live, device)
            return Staged(merged, entries_of(manifest, rank, merged))
        entries = tuple(entry for entry in manifest.entries if entry.rank == rank)
        received = dict(read_shard(manifest, rank, device_buffer) if manifest.num_shards else read_version(manifest))
        if manifest.num_shards and bucket_bytes is not None:
            return Staged(ShardChunks(received, entries, manifest.version, bucket_bytes, device), entries)
        if device.type == "cuda":
            received = {name: values.to(device) for name, values in received.items()}
        check_received(received, entries, manifest.version, f" for rank {rank}")
        return Staged(received, entries)


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Run the body on a CUDA stream beside the model's, and synchronize it at the end; on the CPU, unchanged."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = _own_stream(torch.cuda.current_device())
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


@cache
def _own_stream(device_index: int) -> torch.cuda.Stream:
    """The same one for every version: torch's allocator reuses a block only on the stream that has freed it, and a new
    stream is one of 32 in turn, so what a version has freed would be kept for the 32nd after it.
    """
    return torch.cuda.Stream(device_index)
