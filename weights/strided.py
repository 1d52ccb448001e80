"""Boxes of tensors, where a layout says they are, and copies of them."""

from __future__ import annotations

import numpy as np
import torch

from penstock.weights.layout.algebra import Shape, View


def strided_box(flat: torch.Tensor, shape: Shape, view: View) -> torch.Tensor:
    """A strided box of a flat tensor, which may itself be a part of a larger storage."""
    return torch.as_strided(flat, shape, view.strides, int(flat.storage_offset()) + view.offset)


def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`, by memcpy where that is all there is to do: torch's own loop takes longer for large ones.

    Args:
        target: Of any device, layout and dtype.
        source: Likewise, of the same shape.
    """
    both = (target, source)
    is_plain = target.dtype == source.dtype and all(one.device.type == "cpu" and one.is_contiguous() for one in both)
    if is_plain and target.numel():
        into, values = (one.detach().view(-1).view(torch.uint8).numpy() for one in both)
        np.copyto(into, values)
    else:
        target.copy_(source)
