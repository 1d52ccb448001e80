"""Which owner sends a piece: egress as even as ownership allows, the same node first.

Pieces with one owner are fixed. The others are poured like water: for each set of owners, from the smallest to the
largest, the level is raised until the set's bytes fit, and pieces are cut at the level, in whole rows where that is
fine enough. When the sets of owners are nested or disjoint, as replicas and partitions make them, this gives the least
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
"""Pieces are cut until loads agree to a part in so many."""


class Assignment(NamedTuple):
    """A piece and its sender."""

    piece: Piece
    src_rank: int


def assign(
    pieces: Iterable[Piece], item_bytes: int, resident: Mapping[int, int], is_near: Callable[[int, int], bool]
) -> list[Assignment]:
    """Choose one sender for every element.

    Args:
        pieces: What is needed, with its owners.
        item_bytes: Size of an element.
        resident: Destination rank -> source rank on the same device; what is local loads no sender.
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
        chosen += _pour(shared[owners], owners, load, item_bytes)
    return chosen


def _pour(pieces: list[Piece], owners: tuple[int, ...], load: dict[int, int], item_bytes: int) -> Iterator[Assignment]:
    """Give a set of owners its pieces, and count them in `load`."""
    level = _level([load[rank] for rank in owners], sum(volume(piece.box) for piece in pieces) * item_bytes)
    grain = level / item_bytes / GRAINS
    waiting = sorted(owners, key=lambda rank: -load[rank])
    todo = pieces[::-1]
    while todo:
        piece, rank = todo.pop(), waiting[-1]
        room = (level - load[rank]) / item_bytes
        if len(waiting) > 1 and volume(piece.box) > room + grain:
            parts = _split(piece, room, grain)
            if room >= grain and parts:
                todo += parts[::-1]
            else:
                todo.append(piece)
                waiting.pop()
            continue
        load[rank] += volume(piece.box) * item_bytes
        yield Assignment(piece, rank)


def _level(loads: list[int], num_bytes: int) -> float:
    """Height of the water when `num_bytes` are poured over `loads`."""
    loads = sorted(loads)
    for count in range(1, len(loads) + 1):
        level = (num_bytes + sum(loads[:count])) / count
        if count == len(loads) or level <= loads[count]:
            return level
    raise AssertionError("no owner")


def _split(piece: Piece, room: float, grain: float) -> list[Piece]:
    """The rows of a piece that fit into `room` elements, and the rest. If none fits, its first row, and the rest.

    Returns nothing if the piece is one row that is not worth cutting: at most a `grain`.
    """
    for axis, (start, stop) in enumerate(piece.box):
        row = volume(piece.box) // (stop - start)
        if stop - start > 1:
            middle = start + max(int(room / row), 1 if row > grain else 0)
            borders = sorted({start, min(middle, stop), stop})
            parts = [part_of(piece, cut(piece.box, axis, *ends)) for ends in pairwise(borders)]
            return parts if len(parts) > 1 else []
    return []


def part_of(piece: Piece, box: Box) -> Piece:
    """The piece of a part of its box."""
    sources = {rank: view.at(piece.box, box) for rank, view in piece.sources.items()}
    return piece._replace(box=box, destination=piece.destination.at(piece.box, box), sources=sources)
