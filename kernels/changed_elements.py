"""Which words of a buffer differ from those of another: what weight deltas are made of.

Words are integers of the width of a weight, so bits are compared: a NaN that stays is no change, 0.0 to -0.0 is one.
The bitmap is that of the wire (weights/codec/delta.py): bit i % 8 of byte i // 8, least significant first.

Shape legend: n elements, k of them changed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.portable.changed_elements import compare_words

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
