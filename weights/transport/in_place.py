"""In-place updates: a frozen engine applies a version bucket by bucket, `weights.staging=bucket`.

For engines without memory for a second shard. Live parameters are overwritten while data is still being received, so
the checksum of every bucket is known before the first one is applied, and every bucket is verified in the engine's own
memory before it is copied into a parameter. If an update fails in the middle, the parameters belong to no version: the
engine stays frozen until a complete version has been applied (I8).

States of an engine: serving v → frozen → partly written → read back, serving v + 1; or, from partly written, frozen
until a later version succeeds. Two sources fill the bucket:

- `ShardChunks`: a version buffer in shared memory. It is compared with the manifest during decoding as usual, and the
  checksum of each chunk is kept. So damage is found before the freeze. After that only a newer version can overwrite
  the buffer, since there is only one.
- Messages from other processes (transport/process_group/transfer.py), sent once the engines are frozen. They are
  compared with `ExpectedBuckets`, the senders' checksums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry
from penstock.weights.checksum import compare_received, strided_sum
from penstock.weights.copies import copy_values

IN_PLACE = "in place"
"""`WeightManifest.location` of a version that its senders still hold: engines receive it while they are frozen."""
_WORDS = 2**64


class ShardChunks:
    """A shard in a version buffer, in chunks of at most one bucket, each with its checksum."""

    def __init__(
        self,
        received: Mapping[str, torch.Tensor],
        entries: Sequence[TensorEntry],
        version: int,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        """Compare the version buffer with the manifest, chunk by chunk, and allocate the bucket.

        Args:
            received: Name -> flat values in the version buffer.
            entries: Of the manifest, of this rank.
            version: For error messages.
            bucket_bytes: Size of the bucket.
            device: Of the bucket: that of the live parameters.

        Raises:
            WeightSyncError: If the values differ from the manifest.
        """
        self._version = version
        self._received = received
        (dtype,) = {values.dtype for values in received.values()}
        longest = max(values.numel() for values in received.values())
        self._bucket = torch.empty(min(max(bucket_bytes // dtype.itemsize, 1), longest), dtype=dtype, device=device)
        self._sums: dict[tuple[str, int, int], int] = {}
        for entry in entries:
            values = received[entry.name]
            total = 0
            for start, stop in self._ranges(values.numel()):
                checksum = self._sums[entry.name, start, stop] = strided_sum(values[start:stop], start, (1,))
                total += checksum
            compare_received(total % _WORDS, entry, version)

    @property
    def extra_bytes(self) -> int:
        """Memory in addition to the version buffer and the live parameters."""
        return self._bucket.nbytes

    @torch.no_grad()
    def apply(self, live: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the live parameters.

        Args:
            live: Name -> flat parameter.

        Raises:
            WeightSyncError: If a chunk has changed since it was verified. The parameters belong to no version then.
        """
        for (name, start, stop), checksum in self._sums.items():
            chunk = self._bucket[: stop - start]
            copy_values(chunk, self._received[name][start:stop])
            if (found := strided_sum(chunk, start, (1,))) != checksum:
                raise WeightSyncError(
                    f"publish v{self._version}: elements {start} to {stop} of {name} have checksum {found:x}, but had "
                    f"{checksum:x} before the freeze: a newer version has overwritten the buffer. {PARTLY_WRITTEN}"
                )
            copy_values(live[name][start:stop], chunk)

    def _ranges(self, size: int) -> Iterator[tuple[int, int]]:
        step = self._bucket.numel()
        return pairwise([*range(0, size, step), size]) if size else iter(())


PARTLY_WRITTEN = "The live parameters belong to no version now: the engine serves nothing until an update succeeds."
