"""A version on its way into one rank of an engine, while that rank goes on decoding.

Consumes: the shard in shared memory. Waits for: nothing; a thread compares it with the manifest and, if the device is a
GPU, copies it there on a stream of its own. Unblocked by: the thread's end, which the engine polls. Only then are
running requests frozen, so a damaged version harms nothing and the freeze lasts for one copy within the device.
"""

from __future__ import annotations

import threading
import time

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import WeightManifest
from penstock.weights.checksum import tensor_checksum
from penstock.weights.transport.shards import read_shard


class Staging:
    """Buffers of one version for one tensor-parallel rank, on `device`: the engine's, or the CPU to spare its memory.

    Attributes:
        seconds: How long staging took; 0 while it runs.
    """

    def __init__(self, manifest: WeightManifest, rank: int, device: torch.device) -> None:
        self.seconds = 0.0
        self._manifest = manifest
        self._rank = rank
        self._device = device
        self._staged: dict[str, torch.Tensor] = {}
        self._error: WeightSyncError | None = None
        self._thread = threading.Thread(target=self._run, name=f"stage v{manifest.version}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def error(self) -> str:
        """What is wrong with the version, if anything."""
        return "" if self._error is None else str(self._error)

    def take(self) -> dict[str, torch.Tensor]:
        """Buffer name -> flat values on the device.

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
        arrived = dict(read_shard(self._manifest, self._rank))
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                arrived = {name: values.to(self._device) for name, values in arrived.items()}
                self._compare(arrived)
            stream.synchronize()
        else:
            self._compare(arrived)
        self._staged = arrived

    def _compare(self, arrived: dict[str, torch.Tensor]) -> None:
        for entry in self._manifest.entries:
            if entry.rank != self._rank:
                continue
            checksum = tensor_checksum(arrived[entry.name])
            if checksum != entry.checksum:
                raise WeightSyncError(
                    f"publish v{self._manifest.version}: what arrived of {entry.name} for rank {self._rank} has "
                    f"checksum {checksum:x}, sent was {entry.checksum:x}. It was damaged on the way, or replaced by a "
                    "newer version; the old weights go on serving."
                )
