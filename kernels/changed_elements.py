"""Bitwise comparison of two buffers: finds the changed elements that a weight delta consists of.

Elements are compared as integer words of the width of a weight. An unchanged NaN is therefore not a change, while 0.0
to -0.0 is one. The bitmap has the wire format (weights/codec/delta.py): bit i % 8 of byte i // 8, least significant bit
first.

Shape legend: n elements, k of them changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.dataflow.errors import ShapeError
from penstock.kernels.gpu.dispatch import runs_on_triton

WORD_DTYPES = (torch.int16, torch.int32)


class ChangedElements(Protocol):
    """The changed elements of a buffer. Bitmap, positions and values are computed on request."""

    @property
    def num_elements(self) -> int:
        """n."""

    @property
    def num_changed(self) -> int:
        """k."""

    def bitmap(self) -> Tensor:
        """`[⌈n / 8⌉] uint8`; the bits beyond n are 0."""

    def positions(self) -> Tensor:
        """`[k] int64`, increasing."""

    def values(self) -> Tensor:
        """`[k]` words, in the order of the positions."""


def find_changes(current: Tensor, previous: Tensor) -> ChangedElements:
    """Compare two buffers word by word.

    Args:
        current: `[n] int16` or `int32`, contiguous.
        previous: The previous contents, with equal shape, dtype and device.

    Raises:
        ShapeError: If shapes or dtypes differ, or the dtype is not an integer word.
    """
    if current.shape != previous.shape or current.dtype != previous.dtype or current.dtype not in WORD_DTYPES:
        raise ShapeError(
            f"find_changes: current is {list(current.shape)} {current.dtype}, previous {list(previous.shape)} "
            f"{previous.dtype}. Only equal shapes of one of {WORD_DTYPES} compare bit by bit: view weights as words."
        )
    if runs_on_triton(current):
        from penstock.kernels.gpu.changed_elements import compare_and_count

        return compare_and_count(current.contiguous(), previous.contiguous())
    return compare_words(current, previous)


@dataclass(frozen=True)
class FlaggedChanges:
    """`ChangedElements` in torch, based on one flag per element."""

    current: Tensor
    """`[n]` words."""
    is_changed: Tensor
    """`[n] bool`."""
    num_changed: int
    """k."""

    @property
    def num_elements(self) -> int:
        return self.is_changed.numel()

    def bitmap(self) -> Tensor:
        padded = functional.pad(self.is_changed.view(torch.uint8), (0, -self.num_elements % 8)).view(-1, 8)
        packed = padded[:, 0].clone()
        for bit in range(1, 8):
            packed |= padded[:, bit] << bit
        return packed

    def positions(self) -> Tensor:
        return self.is_changed.nonzero().squeeze(1)

    def values(self) -> Tensor:
        return self.current[self.is_changed]


def compare_words(current: Tensor, previous: Tensor) -> FlaggedChanges:
    """`find_changes` in torch, on any device."""
    is_changed = current != previous
    return FlaggedChanges(current, is_changed, int(is_changed.count_nonzero()))


def bits_of(bitmap: Tensor, num_elements: int) -> Tensor:
    """Unpack a bitmap `[⌈n / 8⌉] uint8`, least significant bit first, to `[n] bool`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return ((bitmap.unsqueeze(1) >> shifts) & 1).flatten()[:num_elements].bool()
