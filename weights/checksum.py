"""Order-sensitive checksums of tensor bytes, computed where the tensor is.

    checksum(x) = Σ_i  word_i · (2·i + 1)  mod 2^64,   word_i = i-th little-endian 32- or 16-bit word of x

Odd position weights are invertible modulo 2^64, so any single changed word changes the sum, and
swapped words change it unless they are equal. It runs on the tensor's own device in one pass: a
guard against lost, stale or misplaced bytes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3
_CHUNK_WORDS = 1 << 24


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Checksum of a tensor's elements in row-major order, 0 ≤ result < 2^64. Any shape, 1-, 2- or 4-byte dtype."""
    words = tensor.detach().contiguous().flatten().view(_WORDS[tensor.element_size()])
    total = 0
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), device=chunk.device, dtype=torch.int64) * 2 + 1
        total = (total + int((chunk * weights).sum())) & _MASK
    return total


def combine_checksums(named: Iterable[tuple[str, int]]) -> int:
    """One checksum for a whole version from per-tensor checksums; independent of the order of names."""
    total = 0
    for name, checksum in named:
        mixed = checksum
        for byte in name.encode():
            mixed = ((mixed ^ byte) * _PRIME) & _MASK
        total = (total + mixed) & _MASK
    return total
