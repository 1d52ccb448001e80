"""Which words of a buffer differ from those of another, and writing them into a third: what weight deltas are made of.

Words are integers of the width of a weight, so bits are compared: a NaN that stays is no change, 0.0 to -0.0 is one.
The bitmap is that of the wire (weights/codec/positions.py): bit i % 8 of byte i // 8, least significant first.

Shape legend: n elements, k of them changed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.portable.changed_elements import FlaggedChanges, compare_words, write_words

WORD_DTYPES = (torch.int16, torch.int32)


class Changes(Protocol):
    """The changed elements of a buffer; what is derived from them is computed when it is asked for."""

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


def find_changes(current: Tensor, previous: Tensor) -> Changes:
    """Compare two buffers word by word.

    Args:
        current: `[n] int16` or `int32`, contiguous.
        previous: The same before, on the same device.

    Raises:
        ShapeError: If they cannot be compared word by word.
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


def flagged_changes(is_changed: Tensor) -> Changes:
    """The changes that `[n] bool` flags name; their words are not known, `values` gives the flags."""
    return FlaggedChanges(is_changed, is_changed, int(is_changed.count_nonzero()))


def write_changes(target: Tensor, bitmap: Tensor, values: Tensor) -> None:
    """Overwrite the words whose bit is set, in place.

    Args:
        target: `[n]` words, contiguous.
        bitmap: `[⌈n / 8⌉] uint8`.
        values: `[k]` words of the same dtype, k being the number of bits set among the first n.

    Raises:
        ShapeError: If sizes or dtypes do not fit each other. (k itself is not counted here.)
    """
    if bitmap.numel() != -(-target.numel() // 8) or values.dtype != target.dtype:
        raise ShapeError(
            f"write_changes: a bitmap of {bitmap.numel()} bytes and {values.dtype} values for {target.numel()} "
            f"elements of {target.dtype}. It takes {-(-target.numel() // 8)} bytes and the same dtype."
        )
    if runs_on_triton(target):
        from penstock.kernels.gpu.changed_elements import write_by_bitmap

        write_by_bitmap(target, bitmap, values)
    else:
        write_words(target, bitmap, values)
