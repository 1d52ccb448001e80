"""Layouts of the training side: replicated, ZeRO-3, AutoTP, both together, and FSDP2.

Ranks are `dp · tp_size + tp`. Every rank's tensors are buffers of their own, named as the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.layout.algebra import (
    Box,
    Layout,
    Shard,
    TensorSpec,
    View,
    cut,
    extents,
    flat_boxes,
    row_major,
    volume,
    whole,
)
from penstock.weights.layout.roles import Role, role_of


def training_layout(
    tensors: Iterable[TensorSpec],
    *,
    num_replicas: int = 1,
    tp_size: int = 1,
    is_partitioned: bool = False,
    num_kv_heads: int | None = None,
) -> Layout:
    """DeepSpeed: ZeRO 0–2 (`num_replicas` whole copies), ZeRO-3 (`is_partitioned`), AutoTP (`tp_size` > 1).

    ZeRO-3 flattens each tensor in row-major order and gives rank r of W the elements [r·p, min((r+1)·p, n)),
    p = ceil(n / W); the tail of the last partition is padding.

    Args:
        tensors: Names and full shapes, tied ones once.
        num_replicas: Data-parallel ranks.
        tp_size: Tensor-parallel ranks.
        is_partitioned: Parameters are partitioned over the data-parallel ranks.
        num_kv_heads: Attention is split in whole key/value heads; needed with `tp_size` > 1.

    Raises:
        WeightSyncError: If it is not known how a tensor is split.
    """
    shards: dict[str, tuple[Shard, ...]] = {}
    buffers: list[dict[str, int]] = [{} for _ in range(num_replicas * tp_size)]
    for tensor in tensors:
        held: list[Shard] = []
        for tp in range(tp_size):
            box = tensor_parallel_box(tensor, tp, tp_size, num_kv_heads)
            num_elements = volume(box)
            part = -(-num_elements // num_replicas) if is_partitioned else num_elements
            for dp in range(num_replicas):
                rank = dp * tp_size + tp
                start = dp * part if is_partitioned else 0
                held += _flat_shards(rank, tensor.name, box, start, min(start + part, num_elements))
                buffers[rank][tensor.name] = part
        shards[tensor.name] = tuple(held)
    return Layout(shards, tuple(buffers))


def fsdp_layout(
    tensors: Iterable[TensorSpec], num_ranks: int, axes: Mapping[str, int] = MappingProxyType({})
) -> Layout:
    """FSDP2, DTensors with `Shard(axis)`: chunks of ceil(n / ranks) rows or columns, the last ones shorter or empty.

    Args:
        tensors: Names and full shapes, tied ones once.
        num_ranks: All tensors are split over all of them.
        axes: Tensor name -> axis that it is split along; 0 for the others, which is what FSDP2 does by itself.

    Raises:
        WeightSyncError: If a tensor has no such axis.
    """
    shards: dict[str, tuple[Shard, ...]] = {}
    buffers: list[dict[str, int]] = [{} for _ in range(num_ranks)]
    for tensor in tensors:
        axis = axes.get(tensor.name, 0)
        held = []
        for rank in range(num_ranks):
            box = chunk_of(tensor, whole(tensor.shape), axis, rank, num_ranks)
            buffers[rank][tensor.name] = volume(box)
            if volume(box):
                held.append(Shard(rank, box, View(tensor.name, 0, row_major(extents(box)))))
        shards[tensor.name] = tuple(held)
    return Layout(shards, tuple(buffers))


def chunk_of(tensor: TensorSpec, box: Box, axis: int, rank: int, num_ranks: int) -> Box:
    """The part of `box` that `Shard(axis)` gives a rank: the rank-th chunk of ceil(n / ranks) along the axis.

    Raises:
        WeightSyncError: If the tensor has no such axis.
    """
    if not 0 <= axis < len(tensor.shape):
        raise WeightSyncError(
            f"weights: {tensor.name} has {len(tensor.shape)} dimensions, so Shard({axis}) cannot split it and nobody "
            "would know where its elements are. Give an axis of its own for it, as its DTensor has."
        )
    start, stop = box[axis]
    chunk = -(-(stop - start) // num_ranks)
    return cut(box, axis, min(start + rank * chunk, stop), min(start + (rank + 1) * chunk, stop))


def _flat_shards(rank: int, name: str, box: Box, start: int, stop: int) -> Iterator[Shard]:
    """Elements [start, stop) of the contiguous local tensor that holds `box`, stored from address 0 on."""
    local = extents(box)
    strides = row_major(local)
    for part in flat_boxes(local, start, stop):
        first = sum(begin * stride for (begin, _), stride in zip(part, strides, strict=True))
        moved = tuple((begin + low, end + low) for (begin, end), (low, _) in zip(part, box, strict=True))
        yield Shard(rank, moved, View(name, first - start, strides))


def tensor_parallel_box(tensor: TensorSpec, rank: int, size: int, num_kv_heads: int | None) -> Box:
    """AutoTP's part of a tensor: attention in whole key/value heads, everything else in equal rows or columns.

    Raises:
        WeightSyncError: If it is not known how the tensor is split.
    """
    box = whole(tensor.shape)
    role = role_of(tensor.name)
    if size == 1 or role is Role.REPLICATED or tensor.name.endswith("embed_tokens.weight"):
        return box
    if role in {Role.EXPERTS_IN, Role.EXPERTS_OUT}:
        raise WeightSyncError(
            f"weights: {tensor.name}: how AutoTP splits stacked experts is not known, so it cannot be sent from there. "
            "Train it without tensor parallelism (ZeRO-3), or set weights.transport=gather."
        )
    axis = 1 if role is Role.ROW_PARALLEL else 0
    units = tensor.shape[axis]
    is_attention = role in {Role.QUERY, Role.KEY, Role.VALUE} or ".self_attn." in tensor.name
    if is_attention and num_kv_heads is not None:
        units = num_kv_heads
    width = tensor.shape[axis] // units
    first = rank * (units // size) + min(rank, units % size)
    count = units // size + (rank < units % size)
    return cut(box, axis, first * width, (first + count) * width)
