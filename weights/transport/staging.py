"""A version on its way into one rank of an engine, while that rank goes on decoding.

Consumes: the shard in its slot, the whole tensors of a file, or the adapters that make it
(weights/transport/adapters.py). Waits
for: nothing; in a thread (weights/transport/background.py) they are compared with the manifest and, if the device is a
GPU, what is in shared memory is first copied there, on a stream of its own. What training ranks have written into
device memory stays where it is. Unblocked by: the thread's end, which the engine polls. Only then are running requests
frozen, so a damaged version harms nothing and the freeze lasts for one copy within the device, or for the loading of
the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from penstock.dataflow.errors import WeightSyncError, boundary
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.checksum import check_arrived
from penstock.weights.transport.adapters import BaseWeights, entries_of
from penstock.weights.transport.background import on_own_stream
from penstock.weights.transport.device_memory import DeviceSlot
from penstock.weights.transport.shards import read_shard
from penstock.weights.transport.shared_memory import read_version
from penstock.weights.transport.streaming import Pieces


class Staged(NamedTuple):
    """One version for one tensor-parallel rank.

    Attributes:
        values: Buffer name -> flat values, where the version waits for its swap; or what streams.
        entries: What the live parameters of this rank must be after the swap.
    """

    values: dict[str, torch.Tensor] | Pieces
    entries: tuple[TensorEntry, ...]


def stage(
    manifest: WeightManifest,
    rank: int,
    device: torch.device,
    base: BaseWeights,
    live: Mapping[str, torch.Tensor],
    slot: DeviceSlot | None,
    bucket_bytes: int | None = None,
) -> Staged:
    """Fetch a version and compare it with its manifest.

    Args:
        manifest: The version.
        rank: Of the engine.
        device: Where it waits for its swap: the engine's, or the CPU to spare its memory.
        base: What adapters are added to.
        live: Parameters by name; only read.
        slot: Of this rank in device memory, if it has one.
        bucket_bytes: Hold no more than this of a shard, which then streams through it under the freeze
            (streaming.py); None: hold all of it.

    Raises:
        WeightSyncError: If the bytes that arrived are not those of the manifest.
    """
    with boundary(WeightSyncError, f"publish v{manifest.version}: staging"), on_own_stream(device):
        if manifest.adapters is not None:
            merged = base.merge(manifest, live, device)
            return Staged(merged, entries_of(manifest, rank, merged))
        entries = tuple(entry for entry in manifest.entries if entry.rank == rank)
        arrived = dict(read_shard(manifest, rank, slot) if manifest.num_shards else read_version(manifest))
        if manifest.num_shards and bucket_bytes is not None:
            return Staged(Pieces(arrived, entries, manifest.version, bucket_bytes, device), entries)
        if device.type == "cuda":
            arrived = {name: values.to(device) for name, values in arrived.items()}
        check_arrived(arrived, entries, manifest.version, f" for rank {rank}")
        return Staged(arrived, entries)
