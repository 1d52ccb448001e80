"""A version on its way into one rank of an engine, while that rank goes on decoding.

Consumes: the shard in its slot, the whole tensors of a file, or the adapters that make it (weights/adapters.py). Waits
for: nothing; a thread compares them with the manifest and, if the device is a GPU, first copies what is in shared
memory there, on a stream of its own. What training ranks have written into device memory stays where it is. Unblocked
by: the thread's end, which the engine polls. Only then are running requests frozen, so a damaged version harms nothing
and the freeze lasts for one copy within the device, or for the loading of the file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import WeightManifest
from penstock.weights.adapters import BaseWeights, entries_of
from penstock.weights.checksum import check_arrived
from penstock.weights.streaming import Pieces
from penstock.weights.transport.device_memory import DeviceSlot
from penstock.weights.transport.shards import read_shard
from penstock.weights.transport.shared_memory import read_version


class Staging:
    """Buffers of one version for one tensor-parallel rank, on `device`: the engine's, or the CPU to spare its memory.

    Attributes:
        seconds: How long staging took; 0 while it runs.
        entries: What the live parameters of this rank must be after the swap; of adapters, once it is done.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        rank: int,
        device: torch.device,
        base: BaseWeights,
        live: Mapping[str, torch.Tensor],
        slot: DeviceSlot | None,
        bucket_bytes: int | None = None,
    ) -> None:
        """Begin.

        Args:
            manifest: The version.
            rank: Of the engine.
            device: Where it waits for its swap.
            base: What adapters are added to.
            live: Parameters by name; only read.
            slot: Of this rank in device memory, if it has one.
            bucket_bytes: Hold no more than this of a shard, which then streams through it under the freeze
                (streaming.py); None: hold all of it.
        """
        self.seconds = 0.0
        self.entries = tuple(entry for entry in manifest.entries if entry.rank == rank)
        self._base = base
        self._live = live
        self._slot = slot
        self._bucket_bytes = bucket_bytes
        self._manifest = manifest
        self._rank = rank
        self._device = device
        self._staged: dict[str, torch.Tensor] | Pieces = {}
        self._error: WeightSyncError | None = None
        self._thread = threading.Thread(target=self._run, name=f"stage v{manifest.version}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def error(self) -> str:
        """What is wrong with the version, if anything."""
        return "" if self._error is None else str(self._error)

    def take(self) -> dict[str, torch.Tensor] | Pieces:
        """Buffer name -> flat values on the device; or what streams.

        Raises:
            WeightSyncError: If the bytes that arrived are not those of the manifest.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._staged

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self._stage()
        except WeightSyncError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the version cannot be used
            self._error = WeightSyncError(
                f"publish v{self._manifest.version}: staging: {type(error).__name__}: {error}"
            )
        self.seconds = time.monotonic() - started

    def _stage(self) -> None:
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                self._staged = self._fetch()
            stream.synchronize()
        else:
            self._staged = self._fetch()

    def _fetch(self) -> dict[str, torch.Tensor] | Pieces:
        """The version's values on the device, compared with the manifest."""
        if self._manifest.adapters is not None:
            merged = self._base.merge(self._manifest, self._live, self._device)
            self.entries = entries_of(self._manifest, self._rank, merged)
            return merged
        if self._manifest.num_shards:
            arrived = dict(read_shard(self._manifest, self._rank, self._slot))
            if self._bucket_bytes is not None:
                return Pieces(arrived, self.entries, self._manifest.version, self._bucket_bytes, self._device)
        else:
            arrived = dict(read_version(self._manifest))
        if self._device.type == "cuda":
            arrived = {name: values.to(self._device) for name, values in arrived.items()}
        check_arrived(arrived, self.entries, self._manifest.version, f" for rank {self._rank}")
        return arrived
