"""The torch version of `kernels.changed_elements`, by way of one flag per element.

Shape legend: n elements, k of them changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class FlaggedChanges:
    """Implements `Changes`.

    Attributes:
        current: `[n]` words.
        is_changed: `[n] bool`.
        num_changed: k.
    """

    current: Tensor
    is_changed: Tensor
    num_changed: int

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
    """See `kernels.changed_elements.find_changes`."""
    is_changed = current != previous
    return FlaggedChanges(current, is_changed, int(is_changed.count_nonzero()))


def bits_of(bitmap: Tensor, num_elements: int) -> Tensor:
    """`[⌈n / 8⌉] uint8`, least significant bit first -> `[n] bool`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return ((bitmap.unsqueeze(1) >> shifts) & 1).flatten()[:num_elements].bool()
