"""A slot: where one version of an engine rank's shard is, all its buffers one after the other in one piece of memory.

There are two kinds: files that a node shares (shards.py) and memory of the engine's device (device_memory.py). How they
are made and opened differs; who writes what and when, and how it is checked, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

ALIGNMENT_BYTES = 64


class Slots(Protocol):
    """The slots of an engine, or of all engines of a node, as a writer has them."""

    def buffers(self, version: int, engine_rank: int) -> Mapping[str, torch.Tensor]:
        """Name -> flat tensor: where to write what an engine rank needs of a version."""
        ...

    def complete(self) -> None:
        """Wait until what was written is there for other processes."""
        ...


def slot_size(sizes: Mapping[str, int], dtype: torch.dtype) -> int:
    """Elements of a slot, from those of its buffers."""
    return sum(_aligned(size, dtype) for size in sizes.values())


def cut_slot(flat: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Cut a slot into its buffers, each on a cache line of its own."""
    buffers, start = {}, 0
    for name, size in sizes.items():
        buffers[name] = flat[start : start + size]
        start += _aligned(size, flat.dtype)
    return buffers


def _aligned(size: int, dtype: torch.dtype) -> int:
    step = ALIGNMENT_BYTES // dtype.itemsize
    return -(-size // step) * step
