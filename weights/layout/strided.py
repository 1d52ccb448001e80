"""Access to a box of a tensor through its strided view."""

from __future__ import annotations

import torch

from penstock.weights.layout.algebra import Shape, View


def strided_box(flat: torch.Tensor, shape: Shape, view: View) -> torch.Tensor:
    """A strided box of a flat tensor, which may itself be a part of a larger storage."""
    return torch.as_strided(flat, shape, view.strides, int(flat.storage_offset()) + view.offset)
