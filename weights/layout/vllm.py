"""vLLM's layout of a decoder over `tp` tensor-parallel ranks.

Fused parameters stack the parts of one rank: `qkv_proj` is [q heads; k heads; v heads] of the rank, `gate_up_proj` is
[gate rows; up rows], the experts' `w13_weight` is the same per expert. When tp > key/value heads, each head is
replicated on tp ÷ heads consecutive ranks. The vocabulary is padded with rows at its end to a multiple of 64 and then
split evenly, so the last ranks may hold little or nothing of it. A tied lm_head has no buffer of its own.

This is what the weight loaders write. Some kernels for experts change it afterwards; engines refuse those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.layout.algebra import Box, Layout, Shard, TensorSpec, View, cut, extents, row_major, volume, whole
from penstock.weights.layout.roles import Role, role_of
from penstock.weights.model_config import ModelShape

VOCABULARY_PADDING = 64
_FUSED = {
    Role.QUERY: ("q_proj", "qkv_proj"),
    Role.KEY: ("k_proj", "qkv_proj"),
    Role.VALUE: ("v_proj", "qkv_proj"),
    Role.GATE: ("gate_proj", "gate_up_proj"),
    Role.UP: ("up_proj", "gate_up_proj"),
    Role.EXPERTS_IN: ("gate_up_proj", "routed_experts.w13_weight"),
    Role.EXPERTS_OUT: ("down_proj", "routed_experts.w2_weight"),
}


@dataclass(slots=True)
class _Rank:
    """Shards and buffers of one rank while they are built."""

    rank: int
    shards: dict[str, list[Shard]] = field(default_factory=lambda: defaultdict(list))
    buffers: dict[str, int] = field(default_factory=dict)

    def append(self, tensor: str, box: Box, buffer: str) -> None:
        """Put a box behind what the buffer holds already: how vLLM stacks the parts of a fused parameter."""
        offset = self.buffers.setdefault(buffer, 0)
        if volume(box):
            self.shards[tensor].append(Shard(self.rank, box, View(buffer, offset, row_major(extents(box)))))
            self.buffers[buffer] = offset + volume(box)


def vllm_layout(tensors: Iterable[TensorSpec], model: ModelShape, tp_size: int = 1) -> Layout:
    """Where one engine's `tp_size` workers hold a model.

    Raises:
        WeightSyncError: If the model has a tensor whose layout is not known, or cannot be split so.
    """
    listed = sorted(tensors, key=lambda tensor: _stack_order(tensor.name))
    ranks = [_Rank(rank) for rank in range(tp_size)]
    for tensor in listed:
        role = role_of(tensor.name)
        for rank in ranks:
            _place(tensor, role, model, rank, tp_size)
    shards = {
        tensor.name: tuple(shard for rank in ranks for shard in rank.shards.get(tensor.name, ())) for tensor in listed
    }
    return Layout(shards, tuple(rank.buffers for rank in ranks))


def _place(tensor: TensorSpec, role: Role, model: ModelShape, rank: _Rank, tp_size: int) -> None:
    name, box = tensor.name, whole(tensor.shape)
    if role is Role.VOCABULARY:
        padded = -(-tensor.shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
        start, stop = _even(name, padded, rank.rank, tp_size)
        vocabulary = tensor.shape[0]
        rank.append(name, cut(box, 0, min(start, vocabulary), min(stop, vocabulary)), name)
        rank.buffers[name] = (stop - start) * tensor.shape[1]
    elif role is Role.ROW_PARALLEL:
        rank.append(name, cut(box, 1, *_even(name, tensor.shape[1], rank.rank, tp_size)), name)
    elif role is Role.REPLICATED:
        rank.append(name, box, name)
    elif role is Role.EXPERTS_IN:
        _place_experts(tensor, rank, tp_size)
    elif role is Role.EXPERTS_OUT:
        rank.append(name, cut(box, 2, *_even(name, tensor.shape[2], rank.rank, tp_size)), fused_name(name, role))
    else:
        heads = {Role.QUERY: model.num_heads, Role.KEY: model.num_kv_heads, Role.VALUE: model.num_kv_heads}
        is_kv = role in {Role.KEY, Role.VALUE}
        start, stop = _even(name, heads.get(role, tensor.shape[0]), rank.rank, tp_size, is_replicated=is_kv)
        width = model.head_dim if role in heads else 1
        rank.append(name, cut(box, 0, start * width, stop * width), fused_name(name, role))


def _place_experts(tensor: TensorSpec, rank: _Rank, tp_size: int) -> None:
    """Gate and up rows of all experts: two boxes that interleave expert by expert in one buffer."""
    experts, rows, columns = tensor.shape
    half = rows // 2
    start, stop = _even(tensor.name, half, rank.rank, tp_size)
    width = stop - start
    buffer = fused_name(tensor.name, Role.EXPERTS_IN)
    strides = (2 * width * columns, columns, 1)
    for index, first in enumerate((0, half)):
        box = cut(whole(tensor.shape), 1, first + start, first + stop)
        rank.shards[tensor.name].append(Shard(rank.rank, box, View(buffer, index * width * columns, strides)))
    rank.buffers[buffer] = experts * 2 * width * columns


def fused_name(name: str, role: Role) -> str:
    """vLLM's name of the parameter that holds a tensor."""
    part, fused = _FUSED[role]
    head, _, tail = name.rpartition(part)
    return f"{head}{fused}{tail}"


def _even(name: str, count: int, rank: int, size: int, *, is_replicated: bool = False) -> tuple[int, int]:
    """Range of a rank. If that is allowed, fewer units than ranks are each on size ÷ count consecutive ranks."""
    if count % size and not (is_replicated and size % count == 0):
        raise WeightSyncError(
            f"weights: {name} has {count} heads, rows or columns, which cannot be split over {size} tensor-parallel "
            "ranks. Use a rollout.engine.tensor_parallel_size that divides them."
        )
    if count < size:
        unit = rank // (size // count)
        return unit, unit + 1
    return rank * (count // size), (rank + 1) * (count // size)


def _stack_order(name: str) -> tuple[str, int]:
    """Sorts the parts of a fused parameter in the order in which they are stacked."""
    role = role_of(name)
    if role in {Role.QUERY, Role.KEY, Role.VALUE, Role.GATE, Role.UP}:
        return fused_name(name, role), list(_FUSED).index(role)
    return name, 0
