"""Copies of weights within main memory, as fast as the machine copies.

Three things decide their time. torch's own loop writes through the cache; memcpy, from a size on, past it, so that what
is overwritten is not read first. glibc takes that size from the cache that a machine says it has: on a large server
three quarters of hundreds of MiB, which hardly a parameter reaches. And glibc's memcpy takes two to four times as long
where the target begins shortly behind the source, modulo a page: then torch's loop is the faster one.
"""

from __future__ import annotations

import os

import numpy as np
import torch

PAST_THE_CACHE_BYTES = 4 << 20
"""Larger than what a core's own cache holds."""
_PAGE_BYTES = 4096
_SHORTLY_BYTES = 512
_VARIABLE = "GLIBC_TUNABLES"


def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`, by memcpy where that is all there is to do: torch's own loop takes longer for large ones.

    Args:
        target: Of any device, layout and dtype.
        source: Likewise, of the same shape.
    """
    both = (target, source)
    is_plain = target.dtype == source.dtype and all(one.device.type == "cpu" and one.is_contiguous() for one in both)
    if is_plain and target.numel() and not is_shortly_behind(target.data_ptr(), source.data_ptr()):
        into, values = (one.detach().view(-1).view(torch.uint8).numpy() for one in both)
        np.copyto(into, values)
    else:
        target.copy_(source)


def is_shortly_behind(target: int, source: int) -> bool:
    """Whether addresses lie so that memcpy would be slow; equal places in their pages are well."""
    return 0 < (target - source) % _PAGE_BYTES < _SHORTLY_BYTES


def copy_environment() -> dict[str, str]:
    """Variable of a process that copies weights, to be set before it starts; nothing where the user has set it."""
    if _VARIABLE in os.environ:
        return {}
    return {_VARIABLE: f"glibc.cpu.x86_non_temporal_threshold={PAST_THE_CACHE_BYTES:#x}"}
