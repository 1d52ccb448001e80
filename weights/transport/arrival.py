"""Where versions arrive that cross from device to device: one engine rank's own end, in its own process.

Consumes: the messages of the training ranks, or of the engine before it in the relay. Waits for: everyone at a meeting,
then each message. Unblocked by: those, a lost peer, or the time-out of the leg, which ends the crossing. It runs in a
thread beside decoding, and on a GPU on a stream of its own; what has arrived is complete when `receive` returns. One
slot is enough, as in device_memory.py: no version is sent before every engine has acknowledged the one before. Of a
crossing that is streamed there is none: `stream` puts every bucket into live parameters, and generation stands still.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import BucketSum
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.streaming import ExpectedBuckets
from penstock.weights.transport.crossing import Crossing, on_own_stream
from penstock.weights.transport.device_memory import DeviceSlot, slot_for
from penstock.weights.transport.transfer import Transfer


class Arrival:
    """One engine rank's end of crossings."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """Belong to a rank of an engine that computes on `device`."""
        self._slot: DeviceSlot | None = None
        self._rank = rank
        self._device = device
        self._transfer: Transfer | None = None

    def join(self, crossing: Crossing, replica: int, known: DeviceSlot | None) -> DeviceSlot | None:
        """Meet everyone as a rank of the `replica`-th end; the crossing before is left.

        Args:
            crossing: Who takes part in what.
            replica: Place of this engine among its ends.
            known: The slot that this rank has, if it has one: taken if it fits.

        Returns:
            The slot that versions arrive in; None if they are streamed.

        Raises:
            WeightSyncError: If someone does not come, or there is no memory for a version.
        """
        self.close()
        with on_own_stream(self._device):
            transfer, slot = crossing.transfer, None
            if not crossing.is_streamed:
                slot = slot_for(known, transfer.buffers[self._rank], TORCH_DTYPES[transfer.dtype], self._device)
            self._transfer = crossing.join(crossing.members.engine(replica, self._rank), self._device)
        self._slot = slot
        return slot

    def receive(self, version: int) -> None:
        """Receive a version into the slot.

        Raises:
            WeightSyncError: If a peer is lost or too late. What has arrived must not be used.
        """
        if self._transfer is None or self._slot is None:
            raise WeightSyncError(f"publish v{version}: rank {self._rank} of this engine has joined no crossing.")
        with on_own_stream(self._device):
            self._transfer.run(version, {}, self._slot.buffers)

    def stream(self, version: int, sums: Iterable[BucketSum], live: Mapping[str, torch.Tensor]) -> None:
        """Receive a version into live parameters, which nothing may read meanwhile.

        Args:
            version: Of the policy.
            sums: What its buckets must be.
            live: Name -> flat parameter.

        Raises:
            WeightSyncError: If a bucket is damaged, or a peer is lost or too late: they are of no version then.
        """
        if self._transfer is None:
            raise WeightSyncError(f"publish v{version}: rank {self._rank} of this engine has joined no crossing.")
        with on_own_stream(self._device):
            self._transfer.run(version, {}, live, expected=ExpectedBuckets(sums))

    @property
    def extra_bytes(self) -> int:
        """Memory that messages take; at most one bucket, since an engine only receives and passes on."""
        return 0 if self._transfer is None else self._transfer.extra_bytes

    def close(self) -> None:
        """Leave; the slot stays."""
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = None


class Beside:
    """One job at a time in a thread, for processes that are polled."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error = ""

    def begin(self, name: str, job: Callable[[], None]) -> None:
        """Start a job; it begins once the one before has ended, which the time-outs of its legs see to."""
        self._thread = threading.Thread(target=self._run, args=(self._thread, job), name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def error(self) -> str:
        """Why the job failed, if it has."""
        return self._error

    def _run(self, before: threading.Thread | None, job: Callable[[], None]) -> None:
        if before is not None:
            before.join()
        self._error = ""
        try:
            job()
        except WeightSyncError as error:
            self._error = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing of this version can be used
            self._error = f"{type(error).__name__}: {error}"
