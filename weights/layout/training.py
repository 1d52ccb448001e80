"""Layouts of the training ranks: replicated, ZeRO-3, FSDP2, AutoTP, or ZeRO-3 with AutoTP.

Ranks are `dp · tp_size + tp`. Every tensor of a rank is a buffer of its own, with the tensor's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType

from penstock.weights.layout.algebra import (
    Box,
    Layout,
    Shard,
    TensorSpec,
    View,
    extents,
    flat_boxes,
    row_major,
    volume,
    whole,
)

Splits = Mapping[str, Sequence[Box]]
"""Name -> the box that each tensor-parallel rank holds; of unnamed tensors every rank holds all."""
NOTHING_SPLIT: Splits = MappingProxyType({})


def training_layout(
    tensors: Iterable[TensorSpec],
    *,
    num_replicas: int = 1,
    tp_size: int = 1,
    is_partitioned: bool = False,
    by_rows: bool = False,
    num_copies: int = 1,
    splits: Splits = NOTHING_SPLIT,
) -> Layout:
    """ZeRO 0–2 (`num_replicas` whole copies), ZeRO-3 (`is_partitioned`), FSDP2 (`by_rows` too), AutoTP (`tp_size` > 1).

    ZeRO-3 flattens each tensor in row-major order and gives rank r of W the elements [r·p, min((r+1)·p, n)),
    p = ceil(n / W); the tail of the last partition is padding. FSDP2 gives it whole rows, ceil(rows / W) of them: the
    last ranks may have fewer, or none. W = `num_replicas` / `num_copies`; rank r of each copy holds the same.

    Args:
        tensors: Names and full shapes, tied ones once.
        num_replicas: Data-parallel ranks.
        tp_size: Tensor-parallel ranks.
        is_partitioned: Parameters are partitioned over the data-parallel ranks.
        by_rows: Partitions are whole rows, and not padded.
        num_copies: So many times they hold all of a partitioned model (HSDP).
        splits: How AutoTP has split the tensors, read from the live model.
    """
    shards: dict[str, tuple[Shard, ...]] = {}
    buffers: list[dict[str, int]] = [{} for _ in range(num_replicas * tp_size)]
    for tensor in tensors:
        held: list[Shard] = []
        for tp in range(tp_size):
            box = splits[tensor.name][tp] if tensor.name in splits else whole(tensor.shape)
            num_elements, num_parts = volume(box), num_replicas // num_copies if is_partitioned else 1
            unit = prod(extents(box)[1:]) if by_rows else 1
            part = -(-num_elements // (unit * num_parts)) * unit
            for dp in range(num_replicas):
                rank = dp * tp_size + tp
                start = dp % num_parts * part
                stop = min(start + part, num_elements)
                held += _flat_shards(rank, tensor.name, box, start, stop)
                buffers[rank][tensor.name] = max(stop - start, 0) if by_rows else part
        shards[tensor.name] = tuple(held)
    return Layout(shards, tuple(buffers))


def _flat_shards(rank: int, name: str, box: Box, start: int, stop: int) -> Iterator[Shard]:
    """Elements [start, stop) of the contiguous local tensor that holds `box`, stored from address 0 on."""
    local = extents(box)
    strides = row_major(local)
    for part in flat_boxes(local, start, stop):
        first = sum(begin * stride for (begin, _), stride in zip(part, strides, strict=True))
        moved = tuple((begin + low, end + low) for (begin, end), (low, _) in zip(part, box, strict=True))
        yield Shard(rank, moved, View(name, first - start, strides))
