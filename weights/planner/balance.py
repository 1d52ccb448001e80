"""Which owner sends a piece: bytes sent per rank as even as ownership allows, owners on the same node first.

Pieces with one owner are fixed. The others are assigned by water-filling: for each set of owners, from the smallest to
the largest, the level is raised until the set's bytes fit, and pieces are cut at the level, in whole rows if that is
fine enough. If the sets of owners are nested or disjoint, as replicas and partitions make them, this gives the least
possible maximum (to one part in `GRAINS`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from penstock.weights.layout.algebra import Box, cut, volume
from penstock.weights.planner.pieces import Piece

GRAINS = 64
"""Pieces are cut until the loads agree to one part in this number."""


class Assignment(NamedTuple):
    """A piece and its sender."""

    piece: Piece
    src_rank: int


def assign(
    pieces: Iterable[Piece], item_bytes: int, resident: Mapping[int, int], is_near: Callable[[int, int], bool]
) -> list[Assignment]:
    """Choose one sender for every element.

    Args:
        pieces: The needed pieces, with their owners.
        item_bytes: Size of an element.
        resident: Destination rank -> source rank on the same device; local pieces add no load to a sender.
        is_near: `(source rank, destination rank)` -> whether they share a node.
    """
    chosen: list[Assignment] = []
    shared: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        local = resident.get(piece.dst_rank)
        if local is not None and local in piece.sources:
            chosen.append(Assignment(piece, local))
            continue
        near = tuple(rank for rank in piece.sources if is_near(rank, piece.dst_rank))
        shared[tuple(sorted(near or piece.sources))].append(piece)
    load: dict[int, int] = defaultdict(int)
    for owners in sorted(shared, key=lambda owners: (len(owners), owners)):
        chosen += _fill(shared[owners], owners, load, item_bytes)
    return chosen


def _fill(pieces: list[Piece], owners: tuple[int, ...], load: dict[int, int], item_bytes: int) -> Iterator[Assignment]:
    """Assign pieces to a set of owners, and count them in `load`."""
    level = _level([load[rank] for rank in owners], sum(volume(piece.box) for piece in pieces) * item_bytes)
    grain = level / item_bytes / GRAINS
    waiting = sorted(owners, key=lambda rank: -load[rank])
    todo = pieces[::-1]
    while todo:
        piece, rank = todo.pop(), waiting[-1]
        space = (level - load[rank]) / item_bytes
        if len(waiting) > 1 and volume(piece.box) > space + grain:
            parts = _split(piece, space, grain)
            if space >= grain and parts:
                todo += parts[::-1]
            else:
                todo.append(piece)
                waiting.pop()
            continue
        load[rank] += volume(piece.box) * item_bytes
        yield Assignment(piece, rank)


def _level(loads: list[int], num_bytes: int) -> float:
    """Water level after `num_bytes` are added to `loads`."""
    loads = sorted(loads)
    for count in range(1, len(loads) + 1):
        level = (num_bytes + sum(loads[:count])) / count
        if count == len(loads) or level <= loads[count]:
            return level
    raise AssertionError("no owner")


def _split(piece: Piece, space: float, grain: float) -> list[Piece]:
    """The rows of a piece that fit into `space` elements, and the rest. If none fits, its first row, and the rest.

    Returns an empty list if the piece is a single row of at most `grain` elements, which is not worth cutting.
    """
    for axis, (start, stop) in enumerate(piece.box):
        row = volume(piece.box) // (stop - start)
        if stop - start > 1:
            middle = start + max(int(space / row), 1 if row > grain else 0)
            borders = sorted({start, min(middle, stop), stop})
            parts = [part_of(piece, cut(piece.box, axis, *range_)) for range_ in pairwise(borders)]
            return parts if len(parts) > 1 else []
    return []


def part_of(piece: Piece, box: Box) -> Piece:
    """The piece of a part of its box."""
    sources = {rank: view.at(piece.box, box) for rank, view in piece.sources.items()}
    return piece._replace(box=box, destination=piece.destination.at(piece.box, box), sources=sources)
