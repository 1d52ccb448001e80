"""Layouts that are traced from a weight loader: it runs on meta tensors, and every copy is recorded.

On the meta device a tensor is a storage, an offset, a shape and strides, and nothing is computed. So a loader runs in
milliseconds, and source and target of each `copy_` are strided views of two storages, which give the layout. Views need
no rule of their own. Operations that move elements into a new storage (clone, contiguous, reshape, cat, stack, a cast)
are followed: a storage records, box by box, where its elements came from. Functions of single elements give a derived
tensor (derived.py). Other operations that compute new elements (index by a tensor, arithmetic) have no layout; it is an
error if their result is copied into a parameter.

Elements that no copy has written are padding; a later copy replaces an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.layout.algebra import (
    Box,
    Range,
    Shape,
    Shard,
    TensorSpec,
    View,
    extents,
    intersect,
    row_major,
    subtract,
    whole,
)
from penstock.weights.layout.derived import FUNCTIONS, derived_name, source_name

aten = torch.ops.aten
_MOVES = {aten.clone.default, aten._to_copy.default}  # noqa: SLF001 - what `contiguous` and `to` are
_JOINS = {aten.cat.default, aten.stack.default}
_FILLS = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
_FUNCTIONS = {getattr(aten, name).default: name for name in FUNCTIONS}
_EMPTY = {
    getattr(aten, name).default
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
}
MAX_BOXES = 65_536
"""Most boxes of one copy; a copy that scatters into more is no layout that a plan could use."""


class _Piece(NamedTuple):
    """A box of a storage, in its own shape, and the addresses of a source tensor that its elements came from."""

    box: Box
    source: View


class _Storage:
    """The dense shape of a storage, and where its elements came from.

    Attributes:
        owner: A tensor of this storage. Kept, since the address of a freed storage may be reused.
        computed: The operation that computed elements of it, which are then no copies; empty if there is none.
    """

    def __init__(self, owner: torch.Tensor) -> None:
        self.owner = owner
        dense = sorted(zip(owner.stride(), owner.shape, strict=True), reverse=True)
        self.shape: Shape = tuple(extent for _, extent in dense)
        rows = row_major(self.shape)
        is_dense = all(extent == 1 or stride == row for (stride, extent), row in zip(dense, rows, strict=True))
        size = owner.untyped_storage().nbytes() // owner.element_size()
        if owner.storage_offset() or owner.numel() != size or not is_dense:
            self.shape = (size,)
        self.pieces: list[_Piece] = []
        self.computed = ""

    def replace(self, box: Box, piece: _Piece | None) -> None:
        """Replace the recorded origin of the elements of a box."""
        (start, stop), *_ = box or ((0, 1),)
        kept = []
        for old in self.pieces:
            (first, last), *_ = old.box or ((0, 1),)
            if first >= stop or start >= last or intersect(old.box, box) is None:
                kept.append(old)
                continue
            kept += [_Piece(rest, old.source.at(old.box, rest)) for rest in subtract(old.box, box)]
        self.pieces = [*kept, piece] if piece is not None else kept


class Trace(TorchDispatchMode):
    """Follows the elements of some source tensors through everything that runs inside it (`with Trace(...) as trace`).

    Attributes:
        sources: Name -> tensor on the meta device.
    """

    def __init__(self, sources: Iterable[TensorSpec], dtype: torch.dtype) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}
        self._shapes = {source.name: source.shape for source in sources}
        self.sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in self._shapes.items()}
        for name, tensor in self.sources.items():
            storage = self._storage(tensor)
            storage.pieces = [_Piece(whole(storage.shape), View(name, 0, row_major(storage.shape)))]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors([*args, *kwargs.values()]):
            self._storage(tensor)  # a whole tensor is recorded before any view of it
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        result = func(*args, **kwargs)
        if func in _MOVES:
            self._copy(result, args[0])
        elif func in _FUNCTIONS:
            self._copy(result, args[0])
            self._derive(result, _FUNCTIONS[func])
        elif func in _JOINS:
            self._join(result, args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0)), func)
        elif func in _FILLS:
            self._write(args[0], None)
        elif func not in _EMPTY:
            self._compute(func, result, [*args, *kwargs.values()])
        return result

    def shards(self, rank: int, parameters: Mapping[str, torch.Tensor]) -> dict[str, list[Shard]]:
        """Where the elements of each source are in these parameters, in flat addresses of each; and of what is derived
        from it.

        Raises:
            WeightSyncError: If a parameter has elements that were computed, or no flat addresses.
        """
        found: dict[str, list[Shard]] = {name: [] for name in self._shapes}
        for name, parameter in parameters.items():
            storage = self._storage(parameter)
            if storage.computed:
                raise _untraceable(f"the values it writes into {name} are computed by {storage.computed}, not copied")
            if not parameter.is_contiguous():
                raise _untraceable(
                    f"{name} is not contiguous: strides {parameter.stride()} of {tuple(parameter.shape)}"
                )
            flat = View(name, -int(parameter.storage_offset()), row_major(storage.shape))
            for piece in storage.pieces:
                held = flat.at(whole(storage.shape), piece.box)
                shape = self._shapes[source_name(piece.source.buffer)]
                for box, view in _boxes(shape, extents(piece.box), piece.source, held):
                    found.setdefault(piece.source.buffer, []).append(Shard(rank, box, view))
        return {name: _joined(shards) for name, shards in found.items()}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage holds elements of a source, or elements computed from them."""
        storage = self._storages.get(_key(tensor))
        return storage is not None and bool(storage.pieces or storage.computed)

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        key = _key(tensor)
        if key not in self._storages:
            self._storages[key] = _Storage(tensor)
        return self._storages[key]

    def _copy(self, into: torch.Tensor, of: torch.Tensor) -> None:
        if _key(into) == _key(of) and (into.storage_offset(), into.stride()) == (of.storage_offset(), of.stride()):
            return
        self._write(into, of.expand(into.shape))

    def _derive(self, result: torch.Tensor, function: str) -> None:
        """Record that the elements of a new tensor are a function of what they were copied from."""
        storage = self._storage(result)
        storage.pieces = [
            piece._replace(source=piece.source._replace(buffer=derived_name(function, piece.source.buffer)))
            for piece in storage.pieces
        ]

    def _join(self, into: torch.Tensor, parts: Sequence[torch.Tensor], dim: int, func: Any) -> None:
        start = 0
        for index, part in enumerate(parts):
            if func is aten.stack.default:
                self._write(into.select(dim, index), part)
            elif part.numel():
                self._write(into.narrow(dim, start, part.shape[dim]), part)
                start += part.shape[dim]

    def _write(self, into: torch.Tensor, of: torch.Tensor | None) -> None:
        """Record a copy of one view into another of the same shape; `of` is None for constants."""
        target = self._storage(into)
        shape, there = tuple(into.shape), _view(into)
        source = None if of is None else self._storage(of)
        if source is not None and source.computed:
            target.computed = source.computed
        if source is None or of is None or not source.pieces:
            for box, _ in _boxes(target.shape, shape, there, there):
                target.replace(box, None)
            return
        pieces = list(source.pieces)
        for box, held in _boxes(source.shape, shape, _view(of), there):
            for piece in pieces:
                common = intersect(box, piece.box)
                if common is None:
                    continue
                origin, target_at = piece.source.at(piece.box, common), held.at(box, common)
                for written, came_from in _boxes(target.shape, extents(common), target_at, origin):
                    target.replace(written, _Piece(written, came_from))

    def _compute(self, func: Any, result: Any, arguments: list[Any]) -> None:
        """Mark the result of an operation on elements of a source as computed, unless it is a view of them."""
        given = {_key(tensor) for tensor in _tensors(arguments)}
        has_moved = any(self.holds(tensor) for tensor in _tensors(arguments))
        for tensor in _tensors([result]):
            storage = self._storage(tensor)
            is_view = _key(tensor) in given and not func._schema.is_mutable  # noqa: SLF001 - there is no public name
            if has_moved and not (is_view and tensor.element_size() == storage.owner.element_size()):
                storage.computed = str(func)


def _boxes(base: Shape, shape: Shape, on_base: View, other: View) -> Iterator[tuple[Box, View]]:
    """Split a strided view of a dense tensor into boxes, each with its view in another buffer.

    Every dimension of the view runs along one axis of the tensor, and continues on the next outer axis once it has
    covered the first. A dimension that is no interval of an axis (every second row; an interval that the other view
    holds in pieces) is cut into several boxes.

    Args:
        base: Shape of the tensor, row-major.
        shape: Of both views.
        on_base: The view of the tensor.
        other: A view of the same shape in another buffer.

    Raises:
        WeightSyncError: If the view is not made of boxes, or of too many.
    """
    if 0 in shape:
        return
    steps = row_major(base)
    rest, first = on_base.offset, []
    for step in steps:
        first.append(rest // step)
        rest %= step
    runs: list[list[tuple[int, int, int]]] = [[] for _ in base]  # by axis: (step, extent, stride of the other view)
    cuts: list[list[tuple[int, int, int]]] = []  # each: (axis, start on it, offset of the other view)
    for extent, stride, moved in zip(shape, on_base.strides, other.strides, strict=True):
        if stride == 0 and extent > 1:
            cuts.append([(0, 0, index * moved) for index in range(extent)])
            continue
        while extent > 1:
            axis = next(axis for axis, step in enumerate(steps) if step <= stride)
            step, part = divmod(stride, steps[axis])
            inner = min(extent, -(-base[axis] // step))
            if part or extent % inner or (inner < extent and (inner * step != base[axis] or first[axis] or not axis)):
                raise _untraceable(f"a view {shape} with strides {on_base.strides} is not made of boxes of {base}")
            runs[axis].append((step, inner, moved))
            extent, stride, moved = extent // inner, stride * inner, moved * inner
    box, strides = [], []
    for axis, of_axis in enumerate(runs):
        length, scale = 1, 0
        for step, extent, moved in sorted(of_axis):
            if step == length and (length == 1 or moved == length * scale):
                scale = moved if length == 1 else scale
                length *= extent
            else:
                cuts.append([(axis, index * step, index * moved) for index in range(extent)])
        if first[axis] + sum((extent - 1) * step for step, extent, _ in of_axis) >= base[axis]:
            raise _untraceable(f"a view {shape} with strides {on_base.strides} is not made of boxes of {base}")
        box.append((first[axis], first[axis] + length))
        strides.append(scale)
    if torch.Size(map(len, cuts)).numel() > MAX_BOXES:
        raise _untraceable(
            f"a view {shape} with strides {on_base.strides} of {base} is in more than {MAX_BOXES} pieces"
        )
    for chosen in product(*cuts):
        moved_box: list[Range] = list(box)
        offset = other.offset
        for axis, start, moved in chosen:
            offset += moved
            if base:
                moved_box[axis] = (moved_box[axis][0] + start, moved_box[axis][1] + start)
        yield tuple(moved_box), View(other.buffer, offset, tuple(strides))


def _joined(shards: list[Shard]) -> list[Shard]:
    """Merge adjacent shards with contiguous addresses, as single experts that form a stack."""
    for axis in range(len(shards[0].box) - 1, -1, -1) if shards else ():
        shards = sorted(shards, key=lambda one: (one.view.buffer, *one.box[:axis], *one.box[axis + 1 :], one.box[axis]))
        joined: list[Shard] = []
        for one in shards:
            both = _merged(joined[-1], one, axis) if joined else None
            if both is None:
                joined.append(one)
            else:
                joined[-1] = both
        shards = joined
    return [shard._replace(view=_row_major_where_free(shard)) for shard in shards]


def _merged(left: Shard, right: Shard, axis: int) -> Shard | None:
    """Two shards as one, if they are adjacent along `axis`; else None."""
    (start, stop), (behind, end) = left.box[axis], right.box[axis]
    others = [index for index in range(len(left.box)) if index != axis]
    is_adjacent = stop == behind and left.view.buffer == right.view.buffer
    if not is_adjacent or any(left.box[index] != right.box[index] for index in others):
        return None
    if any(left.view.strides[index] != right.view.strides[index] for index in others if extents(left.box)[index] > 1):
        return None
    moved = right.view.offset - left.view.offset
    stride = left.view.strides[axis] if stop - start > 1 else moved
    if moved != stride * (stop - start) or (end - behind > 1 and right.view.strides[axis] != stride) or stride <= 0:
        return None
    strides = (*left.view.strides[:axis], stride, *left.view.strides[axis + 1 :])
    box = (*left.box[:axis], (start, end), *left.box[axis + 1 :])
    return Shard(left.rank, box, View(left.view.buffer, left.view.offset, strides))


def _row_major_where_free(shard: Shard) -> View:
    """Set the arbitrary strides of dimensions of one element to row-major ones, so that equal layouts compare equal."""
    sizes, strides = extents(shard.box), list(shard.view.strides)
    for axis in range(len(sizes) - 1, -1, -1):
        if sizes[axis] == 1:
            strides[axis] = 1 if axis == len(sizes) - 1 else strides[axis + 1] * sizes[axis + 1]
    return shard.view._replace(strides=tuple(strides))


def _view(tensor: torch.Tensor) -> View:
    return View("", int(tensor.storage_offset()), tuple(tensor.stride()))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - storages without memory have no data_ptr


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _untraceable(why: str) -> WeightSyncError:
    return WeightSyncError(
        f"weights: the layout of the engine's loader cannot be traced: {why}. Set weights.transport=gather: it sends "
        "whole tensors through that loader, at the cost of more bytes."
    )
