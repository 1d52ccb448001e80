"""A version taken while generation stands still, through one bucket: `weights.staging=bucket`.

For engines without memory for a second shard. Live parameters are overwritten while bytes still arrive, so what a
bucket must be is known before the first one is applied, and every bucket is compared in memory of the engine's own
before it touches a parameter. After a failure in the middle the parameters are of no version: the engine stays frozen
until a whole version has gone through (I8).

States of an engine: serving v → frozen → half written → read back, serving v + 1; or, from half written, frozen until
then. Two sources fill the bucket:

- `Pieces`, of a slot in shared memory. Beside decoding the slot is compared with the manifest, as always, and the sum
  of each piece is kept. So damage is found before the freeze; between then and the copy only an overwritten slot can
  be, since there is but one.
- Messages from other processes (transport/transfer.py), which begin when the engines are frozen. `ExpectedBuckets`
  there are their senders' sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry
from penstock.weights.checksum import compare_arrived, strided_sum
from penstock.weights.copies import copy_values

IN_PLACE = "on the way"
"""`WeightManifest.location` of a version that its senders still hold: engines receive it while they are frozen."""
_WORDS = 2**64


class Pieces:
    """A shard in a slot, in pieces of at most one bucket, each with its sum."""

    def __init__(
        self,
        arrived: Mapping[str, torch.Tensor],
        entries: Sequence[TensorEntry],
        version: int,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        """Compare the slot with the manifest, piece by piece, and take the bucket.

        Args:
            arrived: Buffer name -> flat values, where they are.
            entries: Of the manifest, of this rank.
            version: For messages.
            bucket_bytes: Size of the bucket.
            device: Where the bucket is: that of the live parameters.

        Raises:
            WeightSyncError: If they are not those that were sent.
        """
        self._version = version
        self._arrived = arrived
        (dtype,) = {values.dtype for values in arrived.values()}
        longest = max(values.numel() for values in arrived.values())
        self._bucket = torch.empty(min(max(bucket_bytes // dtype.itemsize, 1), longest), dtype=dtype, device=device)
        self._sums: dict[tuple[str, int, int], int] = {}
        for entry in entries:
            values = arrived[entry.name]
            total = 0
            for start, stop in self._ranges(values.numel()):
                checksum = self._sums[entry.name, start, stop] = strided_sum(values[start:stop], start, (1,))
                total += checksum
            compare_arrived(total % _WORDS, entry, version)

    @property
    def extra_bytes(self) -> int:
        """Memory that it holds beside the slot and the live parameters."""
        return self._bucket.nbytes

    @torch.no_grad()
    def apply(self, live: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the parameters; name -> flat tensor.

        Raises:
            WeightSyncError: If a piece is not what was compared before. They are of no version then.
        """
        for (name, start, stop), checksum in self._sums.items():
            piece = self._bucket[: stop - start]
            copy_values(piece, self._arrived[name][start:stop])
            if (found := strided_sum(piece, start, (1,))) != checksum:
                raise WeightSyncError(
                    f"publish v{self._version}: elements {start} to {stop} of {name} have sum {found:x}, and had "
                    f"{checksum:x} before the freeze: the slot was written again under this engine. {HALF_WRITTEN}"
                )
            copy_values(live[name][start:stop], piece)

    def _ranges(self, size: int) -> Iterator[tuple[int, int]]:
        step = self._bucket.numel()
        return pairwise([*range(0, size, step), size]) if size else iter(())


HALF_WRITTEN = "Its parameters are of no version now: it serves nothing until a whole version has come through."
