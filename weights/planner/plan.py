"""The plan of a transfer: every copy from a training rank to an engine rank, in buckets, at the fewest bytes possible.

Symbols: N_d = elements that destination rank d needs, O_d = elements that its own device holds already. Bytes over the
wire = Σ_d |N_d \\ O_d| · size: no plan can send fewer, and this one sends exactly that (docs/concepts/weights.md).
Pure: made once per (model, layouts) and reused for every version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from penstock.weights.layout.algebra import Layout, Shape, View, cut, extents, volume
from penstock.weights.planner.balance import Assignment, assign, part_of
from penstock.weights.planner.pieces import missing_pieces

BUCKET_BYTES = 64 << 20


class PlannedCopy(NamedTuple):
    """One strided box from a source buffer into a destination buffer; sizes, offsets and strides in elements."""

    tensor: str
    shape: Shape
    src_rank: int
    source: View
    dst_rank: int
    destination: View

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """All copies of one transfer."""

    item_bytes: int
    """Size of an element on the wire."""
    bucket_bytes: int
    """Most bytes that any rank sends or receives within one bucket."""
    resident: Mapping[int, int]
    """Destination rank -> source rank on the same device; copies between them are local."""
    buckets: tuple[tuple[PlannedCopy, ...], ...]
    """Copies in the order of transfer."""

    @property
    def copies(self) -> Iterable[PlannedCopy]:
        """The copies of all buckets."""
        return (copy for bucket in self.buckets for copy in bucket)


def make_plan(
    source: Layout,
    destination: Layout,
    item_bytes: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    resident: Mapping[int, int] | None = None,
    source_nodes: Mapping[int, str] | None = None,
    destination_nodes: Mapping[int, str] | None = None,
) -> Plan:
    """Plan a transfer between any two layouts of one model, in either direction.

    Args:
        source: Where the source ranks hold the tensors.
        destination: Where the destination ranks need them.
        item_bytes: Size of an element in the wire dtype.
        bucket_bytes: Extra memory that a rank may use for the data it sends or receives at a time.
        resident: Destination rank -> source rank on the same device, if training and generation share devices.
        source_nodes: Node of each source rank: among owners, those on the destination's node send.
        destination_nodes: Node of each destination rank.

    Raises:
        WeightSyncError: If no source rank holds an element that is needed.
    """
    resident = dict(resident or {})
    here, there = source_nodes or {}, destination_nodes or {}

    def is_near(src_rank: int, dst_rank: int) -> bool:
        return here.get(src_rank) == there.get(dst_rank)

    chosen = assign(missing_pieces(source, destination, resident), item_bytes, resident, is_near)
    order = {name: index for index, name in enumerate(destination.shards)}
    chosen.sort(key=lambda one: (order[one.piece.tensor], one.piece.dst_rank, one.piece.destination.offset))
    largest = max(bucket_bytes // item_bytes, 1)
    copies = [
        PlannedCopy(
            piece.tensor, extents(piece.box), src_rank, piece.sources[src_rank], piece.dst_rank, piece.destination
        )
        for one in chosen
        for piece, src_rank in _at_most(one, largest)
    ]
    return Plan(item_bytes, bucket_bytes, resident, tuple(_buckets(copies, largest)))


def _at_most(one: Assignment, largest: int) -> Iterable[Assignment]:
    """Cut a piece that is larger than a bucket into rows, and rows that are still larger into parts of rows."""
    total = volume(one.piece.box)
    if total <= largest:
        yield one
        return
    axis, (start, stop) = next((a, r) for a, r in enumerate(one.piece.box) if r[1] - r[0] > 1)
    rows = max(largest // (total // (stop - start)), 1)
    for first in range(start, stop, rows):
        box = cut(one.piece.box, axis, first, min(first + rows, stop))
        yield from _at_most(Assignment(part_of(one.piece, box), one.src_rank), largest)


def _buckets(copies: list[PlannedCopy], largest: int) -> Iterable[tuple[PlannedCopy, ...]]:
    """Fill buckets in order; a bucket is closed before any rank would send or receive more than its size."""
    bucket: list[PlannedCopy] = []
    filled: dict[tuple[str, int], int] = defaultdict(int)
    for copy in copies:
        ranks = (("from", copy.src_rank), ("to", copy.dst_rank))
        if bucket and any(filled[rank] + copy.num_elements > largest for rank in ranks):
            yield tuple(bucket)
            bucket, filled = [], defaultdict(int)
        bucket.append(copy)
        for rank in ranks:
            filled[rank] += copy.num_elements
    if bucket:
        yield tuple(bucket)
