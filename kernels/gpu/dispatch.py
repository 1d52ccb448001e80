"""Which tensors a Triton kernel takes: those on a GPU that Triton knows, and all of them under its interpreter.

Under `TRITON_INTERPRET=1`, which Triton reads when a kernel's module is imported, the kernels run on CPU tensors: that
is how they are tested without a GPU.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def is_interpreted() -> bool:
    """True if kernels of this process run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def runs_on_triton(tensor: Tensor) -> bool:
    """True if the Triton version of a kernel is to be used for `tensor`; otherwise the portable one."""
    return has_triton() and (tensor.device.type == "cuda" or is_interpreted())
