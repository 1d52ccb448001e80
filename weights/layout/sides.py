"""How engines hold the policy (reported by an engine), and how the training ranks do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """How engines hold a model, as reported by one of them."""

    type: Literal["vllm", "torch"]
    """Of the engine."""
    layout: Layout
    """Of one engine: its ranks are tensor-parallel."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of an engine."""
        return self.layout.num_ranks

    @property
    def description(self) -> str:
        """For error messages."""
        return f"{self.type}, tensor-parallel over {self.tp_size}"


@dataclass(frozen=True, slots=True)
class TrainingSharding:
    """How the training ranks shard a model: replicated (ZeRO 0 to 2), ZeRO-3, FSDP2, AutoTP, or ZeRO-3 with AutoTP.

    ZeRO-3 flattens each tensor in row-major order and gives rank r of W the elements [r·p, min((r+1)·p, n)),
    p = ceil(n / W); the tail of the last partition is padding. FSDP2 gives it whole rows, ceil(rows / W) of them: the
    last ranks may have fewer, or none. W = `num_replicas` / `num_copies`; rank r of each copy holds the same.
    """

    tensors: tuple[TensorSpec, ...]
    """Names and full shapes, tied ones once."""
    num_replicas: int = 1
    """Ranks that hold the same part of each tensor, or partition it among themselves."""
    is_partitioned: bool = False
    """Each part is partitioned over them (ZeRO-3, FSDP2); otherwise every rank holds all of it."""
    tp_size: int = 1
    """Tensor-parallel ranks, which hold different parts (AutoTP). Rank = replica · tp_size + tensor rank."""
    splits: Mapping[str, Sequence[Box]] = field(default_factory=dict)
    """Name -> the box that each tensor-parallel rank holds, read from the live model; of others each holds all."""
    by_rows: bool = False
    """Partitions are whole rows (FSDP2), not stretches of elements (ZeRO-3)."""
    num_copies: int = 1
    """So many times the ranks hold all of a partitioned model, one copy after the other (HSDP)."""

    @property
    def description(self) -> str:
        """For error messages."""
        kind = "FSDP2" if self.by_rows else "ZeRO-3"
        held = f"partitioned ({kind})" if self.is_partitioned else "replicated (ZeRO 0 to 2)"
        split = f"AutoTP over {self.tp_size}, " if self.tp_size > 1 else ""
        copies = f" in {self.num_copies} copies" if self.num_copies > 1 else ""
        return f"{split}{held} over {self.num_replicas} ranks{copies}"

    def layout(self) -> Layout:
        """Where the ranks hold the model. Every tensor of a rank is a buffer of its own, with the tensor's name."""
        shards: dict[str, tuple[Shard, ...]] = {}
        buffers: list[dict[str, int]] = [{} for _ in range(self.num_replicas * self.tp_size)]
        for tensor in self.tensors:
            held: list[Shard] = []
            for tp in range(self.tp_size):
                box = self.splits[tensor.name][tp] if tensor.name in self.splits else whole(tensor.shape)
                num_elements = volume(box)
                num_parts = self.num_replicas // self.num_copies if self.is_partitioned else 1
                unit = prod(extents(box)[1:]) if self.by_rows else 1
                part = -(-num_elements // (unit * num_parts)) * unit
                for dp in range(self.num_replicas):
                    rank = dp * self.tp_size + tp
                    start = dp % num_parts * part
                    stop = min(start + part, num_elements)
                    held += _flat_shards(rank, tensor.name, box, start, stop)
                    buffers[rank][tensor.name] = max(stop - start, 0) if self.by_rows else part
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
