"""Float32 matrix products on a CPU by oneDNN instead of MKL, where MKL does not use what the CPU has.

torch calls MKL for float32, which runs its AVX2 code on CPUs of other makers than Intel. oneDNN, a part of torch as
well, uses their AVX-512: it is 1.8 times as fast on an AMD EPYC (benchmarks/results/step_profile.md). Both compute in
float32 and differ in the order of their sums.

Shape legend: M × K times K × N.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

MIN_MULTIPLICATIONS = 1 << 20
"""M · K · N from which oneDNN is faster; below, its preparation takes longer than the product."""
SMALL_STEP, LARGE_STEP = 64, 256
"""Rows are padded to multiples of these: oneDNN keeps a program of about 0.2 MiB for each number of rows that it meets,
which are thousands in a run."""


@cache
def use_onednn() -> torch.library.Library | None:
    """Compute `torch.mm` of this process by `product`: all linear layers, forward and backward.

    Returns:
        The registration, which lives as long as the process; None where MKL uses AVX-512 or the CPU has none.
    """
    if not is_faster():
        return None
    registration = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that it is overridden
        registration.impl("mm", product, "CPU", allow_override=True)
    return registration


def is_faster() -> bool:
    """Whether the CPU has AVX-512 that MKL does not use: whether it is AMD's."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    info = Path("/proc/cpuinfo")
    return info.exists() and "AuthenticAMD" in info.read_text(encoding="utf-8")


def product(left: Tensor, right: Tensor) -> Tensor:
    """`[M, N]`: `left @ right`, as `torch.mm`.

    Args:
        left: `[M, K]`, of any strides and dtype.
        right: `[K, N]`, of the same dtype.
    """
    num_rows, is_large = left.shape[0], left.shape[0] * right.numel() >= MIN_MULTIPLICATIONS
    # The gradient of a weight, with more columns than rows, is no faster.
    if left.dtype == right.dtype == torch.float32 and is_large and num_rows >= left.shape[1]:
        step = SMALL_STEP if num_rows <= LARGE_STEP else LARGE_STEP
        if missing := -num_rows % step:
            left = torch.nn.functional.pad(left, (0, 0, 0, missing))
        # The operator with which torch.compile replaces linear layers; there is no public one for float32.
        by_onednn: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")  # noqa: SLF001
        return by_onednn[:num_rows]
    return torch.addmm(left.new_zeros(()), left, right, beta=0)  # what torch.mm did before
