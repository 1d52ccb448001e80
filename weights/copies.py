"""Copies of weights within main memory, at the machine's memory bandwidth.

Three facts decide the copy time. torch's own loop writes through the cache. memcpy uses non-temporal stores above a
threshold, so the overwritten memory is not read first; glibc derives the threshold from the reported cache size, which
on a large server is hundreds of MiB and larger than nearly every parameter. And glibc's memcpy takes two to four times
as long if the target starts shortly after the source, modulo a page; then torch's loop is faster.
"""

from __future__ import annotations

import os

import numpy as np
import torch

NON_TEMPORAL_BYTES = 4 << 20
"""From this size on memcpy bypasses the cache; larger than a core's own cache."""
_PAGE_BYTES = 4096
_SHORTLY_BYTES = 512
_VARIABLE = "GLIBC_TUNABLES"


def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`, by memcpy if both are contiguous CPU tensors of one dtype: faster than torch's loop.

    Args:
        target: Of any device, layout and dtype.
        source: Of the same shape; any device, layout and dtype.
    """
    both = (target, source)
    is_plain = target.dtype == source.dtype and all(one.device.type == "cpu" and one.is_contiguous() for one in both)
    if is_plain and target.numel() and not is_shortly_behind(target.data_ptr(), source.data_ptr()):
        into, values = (one.detach().view(-1).view(torch.uint8).numpy() for one in both)
        np.copyto(into, values)
    else:
        target.copy_(source)


def is_shortly_behind(target: int, source: int) -> bool:
    """Whether memcpy would be slow between these addresses; equal offsets within a page are fast."""
    return 0 < (target - source) % _PAGE_BYTES < _SHORTLY_BYTES


def copy_environment() -> dict[str, str]:
    """Environment of a process that copies weights, set before it starts; empty if the user has set the variable."""
    if _VARIABLE in os.environ:
        return {}
    return {_VARIABLE: f"glibc.cpu.x86_non_temporal_threshold={NON_TEMPORAL_BYTES:#x}"}
