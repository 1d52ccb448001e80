"""Access to boxes of tensors through their strided views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.weights.layout.algebra import Layout, Shape, View, extents, volume


def strided_box(flat: torch.Tensor, shape: Shape, view: View) -> torch.Tensor:
    """A strided box of a flat tensor, which may itself be a part of a larger storage."""
    return torch.as_strided(flat, shape, view.strides, int(flat.storage_offset()) + view.offset)


def whole_tensors(layout: Layout, held: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
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
        assert sum(volume(box) for box, _ in parts) >= volume(tuple((0, size) for size in shape)), (
            f"{name}: a part is missing"
        )
    return whole
