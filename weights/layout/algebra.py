"""The shard algebra: which rank holds which part of which tensor, and where in its memory.

Symbols: a *box* is one index range per dimension of a full tensor; a *shard* is a box that one rank holds, with the
address of each of its elements in one of that rank's buffers: `offset + Σ_d (i_d − start_d) · stride_d`, in elements.
A *layout* is all shards of all tensors over all trainer or engine ranks. Replicated tensors are equal boxes on several
ranks;
a flat partition (ZeRO-3) is a row-major interval, which is at most 2·n − 1 boxes of an n-dimensional tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]
Box = tuple[Range, ...]
Shape = tuple[int, ...]


class View(NamedTuple):
    """Addresses of a box's elements in a buffer, in elements."""

    buffer: str
    offset: int
    strides: Shape

    def at(self, outer: Box, inner: Box) -> View:
        """The view of `inner`, a part of the `outer` box that this view addresses."""
        moved = sum(
            (range_[0] - start) * stride for range_, (start, _), stride in zip(inner, outer, self.strides, strict=True)
        )
        return View(self.buffer, self.offset + moved, self.strides)


class Shard(NamedTuple):
    """A part of a tensor on one rank."""

    rank: int
    box: Box
    view: View


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the source or the destination of a transfer holds a model."""

    shards: Mapping[str, tuple[Shard, ...]]
    """By tensor name."""
    buffers: tuple[Mapping[str, int], ...]
    """By rank: name -> size in elements, padding included."""

    @property
    def num_ranks(self) -> int:
        return len(self.buffers)


def side_by_side(layouts: Sequence[Layout]) -> Layout:
    """One layout of the ranks of all: those of the first layout, then those of the second one, and so on."""
    shards: dict[str, tuple[Shard, ...]] = {}
    first = 0
    for layout in layouts:
        for name, held in layout.shards.items():
            shards[name] = (*shards.get(name, ()), *(shard._replace(rank=first + shard.rank) for shard in held))
        first += layout.num_ranks
    return Layout(shards, tuple(sizes for layout in layouts for sizes in layout.buffers))


class TensorSpec(NamedTuple):
    """A full tensor, by its Hugging Face name."""

    name: str
    shape: Shape


def whole(shape: Shape) -> Box:
    """The box of all of a tensor."""
    return tuple((0, extent) for extent in shape)


def extents(box: Box) -> Shape:
    """Size of a box in each dimension."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements in a box."""
    return prod(stop - start for start, stop in box)


def row_major(shape: Shape) -> Shape:
    """Strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def cut(box: Box, axis: int, start: int, stop: int) -> Box:
    """`box` with another range along one axis."""
    return (*box[:axis], (start, stop), *box[axis + 1 :])


def intersect(left: Box, right: Box) -> Box | None:
    """The common part of two boxes; None if they are disjoint."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < stop for start, stop in common) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, as disjoint boxes: at most two per dimension."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    rest = []
    for axis, (start, stop) in enumerate(common):
        if box[axis][0] < start:
            rest.append(cut(box, axis, box[axis][0], start))
        if stop < box[axis][1]:
            rest.append(cut(box, axis, stop, box[axis][1]))
        box = cut(box, axis, start, stop)
    return rest


def flat_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """The row-major interval [start, stop) of a tensor as disjoint boxes, in order.

    Example: in shape (4, 3), elements 2 … 9 are row 0 from column 2, rows 1 and 2, and row 3 up to column 1.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start, stop),) if shape else ()]
    inner = prod(shape[1:])
    first, last = start // inner, -(-stop // inner)
    if last - first == 1:
        if stop - start == inner:
            return [((first, last), *whole(shape[1:]))]
        return [((first, last), *box) for box in flat_boxes(shape[1:], start - first * inner, stop - first * inner)]
    head, tail = -(-start // inner), stop // inner
    boxes = flat_boxes(shape, start, head * inner) if start % inner else []
    if head < tail:
        boxes.append(((head, tail), *whole(shape[1:])))
    return boxes + (flat_boxes(shape, tail * inner, stop) if stop % inner else [])


def strided_box(flat: Tensor, shape: Shape, view: View) -> Tensor:
    """A strided box of a flat tensor, which may itself be a part of a larger storage."""
    return flat.as_strided(shape, view.strides, int(flat.storage_offset()) + view.offset)


def whole_tensors(layout: Layout, held: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Put tensors together from the parts that ranks hold.

    Args:
        layout: Where the ranks hold them.
        held: By rank: buffer name -> flat tensor. A rank may be left out (empty) if other ranks hold its parts, too.

    Returns:
        Name -> whole tensor. One that a rank holds whole is an alias of it.
    """
    whole = {}
    for name, shards in layout.shards.items():
        shape = tuple(
            max(stops) for stops in zip(*(tuple(stop for _, stop in shard.box) for shard in shards), strict=True)
        )
        there = [shard for shard in shards if shard.view.buffer in held[shard.rank]]
        parts = [(shard.box, strided_box(held[shard.rank][name], extents(shard.box), shard.view)) for shard in there]
        if len(parts) == 1:
            (_, whole[name]) = parts[0]
            assert tuple(whole[name].shape) == shape, f"{name}: a part is missing"
            continue
        whole[name] = parts[0][1].new_empty(shape)
        for box, part in parts:
            whole[name][tuple(slice(*range_) for range_ in box)] = part
        there_once = {box for box, _ in parts}  # copies of a part fill no gap
        assert sum(map(volume, there_once)) >= volume(tuple((0, size) for size in shape)), f"{name}: a part is missing"
    return whole
