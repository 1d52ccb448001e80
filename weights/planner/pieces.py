"""The pieces of tensors that each destination rank needs, with the source ranks that own them.

Every element of a destination shard is in exactly one piece. A piece that the destination's own device holds already
(colocated training and generation) is local: it costs no transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.layout.algebra import Box, Layout, Shard, View, intersect, subtract, volume


class Piece(NamedTuple):
    """A box that one destination shard needs."""

    tensor: str
    box: Box
    dst_rank: int
    destination: View
    """The destination shard's view of the box."""
    sources: Mapping[int, View]
    """Rank of each owner -> its view of the box."""


def missing_pieces(source: Layout, destination: Layout, resident: Mapping[int, int]) -> Iterator[Piece]:
    """Cut every destination shard along the borders of the source shards.

    Args:
        source: Where the source ranks hold the tensors.
        destination: Where the destination ranks need them.
        resident: Destination rank -> source rank on the same device, if there is one.

    Raises:
        WeightSyncError: If a tensor is missing from the source ranks, wholly or in part.
    """
    for tensor, wanted in destination.shards.items():
        owned = source.shards.get(tensor)
        if owned is None:
            raise WeightSyncError(f"weights: the training ranks have no {tensor}, which the engine needs.")
        by_box: dict[Box, dict[int, View]] = defaultdict(dict)  # each box once, with all replicas as its owners
        for shard in owned:
            by_box[shard.box][shard.rank] = shard.view
        for shard in wanted:
            yield from _cover(tensor, shard, by_box.items(), resident.get(shard.rank))


def _cover(
    tensor: str, shard: Shard, by_box: Iterable[tuple[Box, Mapping[int, View]]], resident: int | None
) -> Iterator[Piece]:
    missing = [shard.box]
    for box, owners in sorted(by_box, key=lambda item: resident not in item[1]):  # boxes on the own device come first
        rest: list[Box] = []
        for wanted in missing:
            common = intersect(wanted, box)
            if common is None:
                rest.append(wanted)
                continue
            names = {resident} if resident in owners else owners
            sources = {rank: owners[rank].at(box, common) for rank in names if rank is not None}
            yield Piece(tensor, common, shard.rank, shard.view.at(shard.box, common), sources)
            rest += subtract(wanted, box)
        missing = rest
        if not missing:
            return
    raise WeightSyncError(
        f"weights: {tensor}: no training rank holds {sum(map(volume, missing))} elements that engine rank "
        f"{shard.rank} needs. The two layouts were made from different models."
    )
