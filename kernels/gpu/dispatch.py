"""Dispatch between Triton kernels and portable torch code.

Triton kernels are used for CUDA tensors, and for all tensors under Triton's interpreter. The interpreter is enabled by
`TRITON_INTERPRET=1`, which Triton reads when a kernel's module is imported; it tests the kernels without a GPU.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def is_interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def runs_on_triton(tensor: Tensor) -> bool:
    """Whether `tensor` is processed by the Triton version of a kernel instead of the portable one."""
    return has_triton() and (tensor.device.type == "cuda" or is_interpreted())
