"""A slot: where one version of an engine rank's shard is, all its buffers one after the other in one piece of memory.

There are two kinds: files that a node shares (shards.py) and memory of the engine's device (device_memory.py). How they
are made and opened differs; who writes what and when, and how it is checked, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

ALIGNMENT_BYTES = 64
LARGE_BYTES = 64 << 10
_PAGE_BYTES = 4096
_LARGE_START_BYTES = _PAGE_BYTES // 2
"""In a page. Memory that torch allocates for a large tensor begins shortly behind a page's start: where a slot's
buffers begin there too, or at a page's start, memcpy is slow into one of the two (weights/copies.py)."""


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
    return _starts(sizes, dtype)[-1]


def cut_slot(flat: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Cut a slot, which begins on a page, into its buffers: each on its own cache line, large ones half a page in."""
    starts = _starts(sizes, flat.dtype)
    return {name: flat[start : start + size] for (name, size), start in zip(sizes.items(), starts, strict=False)}


def _starts(sizes: Mapping[str, int], dtype: torch.dtype) -> list[int]:
    """Where each buffer begins, and the slot ends; in elements."""
    starts, end = [], 0
    for size in sizes.values():
        num_bytes = size * dtype.itemsize
        if num_bytes >= LARGE_BYTES:
            end += (_LARGE_START_BYTES - end) % _PAGE_BYTES
        starts.append(end // dtype.itemsize)
        end += num_bytes + -num_bytes % ALIGNMENT_BYTES
    return [*starts, end // dtype.itemsize]
