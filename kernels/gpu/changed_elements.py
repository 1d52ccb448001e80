"""Triton kernels for changed elements: the first pass compares and counts, the second compacts the changed elements.

Besides the changed words, the second pass reads only the bitmap of the first: n / 8 bytes instead of 2 n words.

Shape legend: n elements, k of them changed, b blocks of BLOCK bytes of bitmap (8 BLOCK elements).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.dispatch import is_interpreted

BLOCK = 64 if is_interpreted() else 256
"""Bytes of bitmap per program: 2048 elements."""


@triton.jit
def compare_kernel(current, previous, bitmap, counts, num_elements, BLOCK: tl.constexpr):
    """One program: BLOCK bytes of the bitmap, and how many bits of them are set."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    element = byte[:, None] * 8 + bit[None, :]
    is_inside = element < num_elements
    is_changed = tl.load(current + element, mask=is_inside, other=0) != tl.load(
        previous + element, mask=is_inside, other=0
    )
    packed = tl.sum(is_changed.to(tl.int32) << bit[None, :], 1)
    tl.store(bitmap + byte, packed.to(tl.uint8), mask=byte * 8 < num_elements)
    tl.store(counts + tl.program_id(0), tl.sum(tl.sum(is_changed.to(tl.int32), 1), 0))


@triton.jit
def set_bits(bitmap, num_elements, BLOCK: tl.constexpr):
    """Elements of this program, which of them are set in the bitmap, and the rank of each among those."""
    lane = tl.arange(0, 8 * BLOCK)
    element = tl.program_id(0).to(tl.int64) * (8 * BLOCK) + lane
    byte = tl.load(bitmap + element // 8, mask=element < num_elements, other=0).to(tl.int32)
    is_set = (byte >> (lane % 8)) & 1
    return element, is_set, tl.cumsum(is_set, 0) - is_set


@triton.jit
def gather_kernel(current, bitmap, offsets, positions, values, num_elements, BLOCK: tl.constexpr):
    """One program: positions and words of the changed elements of BLOCK bytes, from `offsets` of the block on."""
    element, is_set, rank = set_bits(bitmap, num_elements, BLOCK)
    is_changed = is_set == 1
    offset = tl.load(offsets + tl.program_id(0)) + rank
    tl.store(positions + offset, element, mask=is_changed)
    tl.store(values + offset, tl.load(current + element, mask=is_changed, other=0), mask=is_changed)


@dataclass(frozen=True)
class CountedChanges:
    """Implements `ChangedElements`."""

    current: Tensor
    """`[n]` words."""
    packed: Tensor
    """`[⌈n / 8⌉] uint8`, the bitmap."""
    offsets: Tensor
    """`[b] int64`, changed elements before each block."""
    num_changed: int
    """k."""

    @property
    def num_elements(self) -> int:
        return self.current.numel()

    def bitmap(self) -> Tensor:
        return self.packed

    def positions(self) -> Tensor:
        return self._gathered[0]

    def values(self) -> Tensor:
        return self._gathered[1]

    @cached_property
    def _gathered(self) -> tuple[Tensor, Tensor]:
        positions = torch.empty(self.num_changed, dtype=torch.int64, device=self.current.device)
        values = self.current.new_empty(self.num_changed)
        if self.num_changed:
            gather_kernel[(len(self.offsets),)](
                self.current, self.packed, self.offsets, positions, values, self.num_elements, BLOCK=BLOCK
            )
        return positions, values


def compare_and_count(current: Tensor, previous: Tensor) -> CountedChanges:
    """See `kernels.changed_elements.find_changes`."""
    num_elements = current.numel()
    num_blocks = triton.cdiv(num_elements, 8 * BLOCK)
    bitmap = torch.empty(triton.cdiv(num_elements, 8), dtype=torch.uint8, device=current.device)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=current.device)
    if num_blocks:
        compare_kernel[(num_blocks,)](current, previous, bitmap, counts, num_elements, BLOCK=BLOCK)
    ends = counts.cumsum(0, dtype=torch.int64)
    return CountedChanges(current, bitmap, ends - counts, int(ends[-1]) if num_blocks else 0)
