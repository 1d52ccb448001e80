"""Order-sensitive checksums of tensor bytes, computed on the device that holds the tensor, whole or part by part.

    checksum(x) = Σ_i  word_i · (2·i + 1)  mod 2^64,   word_i = i-th element of x as a little-endian integer

Odd position weights are invertible modulo 2^64, so any single changed word changes the sum, and swapped words change it
unless they are equal: a guard against lost, stale or misplaced bytes, not against an adversary. It is a sum over
addresses: each sender sums its own part of a buffer (`strided_sum`), the parts add up to the whole, and zeros add 0.

For a block of R × C words, Σ_rc w_rc · (2·(a + r·s + c·t) + 1) = (2·a + 1)·W + 2·s·Σ_r r·W_r + 2·t·Σ_c c·W_c with the
row sums W_r, the column sums W_c and the total W: two passes of additions over a block that stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3
_COLUMNS = 512
_BLOCK_WORDS = {"cpu": 1 << 16}
_DEVICE_BLOCK_WORDS = 1 << 25


class PartialSum(NamedTuple):
    """One sender's contribution to the checksum of a buffer of an engine rank."""

    engine_rank: int
    buffer: str
    checksum: int


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Checksum of a tensor's elements in row-major order, 0 ≤ result < 2^64. Any shape, 1-, 2- or 4-byte dtype."""
    return strided_sum(tensor.detach().contiguous().flatten(), 0, (1,))


def strided_sum(tensor: torch.Tensor, address: int, strides: Sequence[int]) -> int:
    """Contribution of a part of a buffer to the buffer's checksum.

    Args:
        tensor: The part, of n dimensions.
        address: Offset of its first element in the buffer, in elements.
        strides: n strides of its elements in the buffer, in elements.
    """
    words = tensor.detach().view(_WORDS[tensor.element_size()])
    return _sum(words, address, tuple(strides)) & _MASK


def _sum(words: torch.Tensor, address: int, strides: tuple[int, ...]) -> int:
    if words.ndim > 2:
        return sum(_sum(part, address + index * strides[0], strides[1:]) for index, part in enumerate(words))
    if words.ndim == 2:
        return _sum_rows(words, address, *strides)
    words, step = words.reshape(-1), strides[0] if strides else 1
    whole = words.numel() // _COLUMNS * _COLUMNS
    total = _sum_rows(words[whole:].unsqueeze(0), address + whole * step, 0, step)
    if whole:
        total += _sum_rows(words[:whole].view(-1, _COLUMNS), address, _COLUMNS * step, step)
    return total


def _sum_rows(words: torch.Tensor, address: int, row_step: int, column_step: int) -> int:
    num_rows, num_columns = words.shape
    if not words.numel():
        return 0
    num_block_words = _BLOCK_WORDS.get(words.device.type, _DEVICE_BLOCK_WORDS)
    rows = torch.empty(num_rows, dtype=torch.int64, device=words.device)
    columns = torch.zeros(num_columns, dtype=torch.int64, device=words.device)
    height = max(num_block_words // num_columns, 1)
    for start in range(0, num_rows, height):
        block = words[start : start + height].to(torch.int64)
        torch.sum(block, 1, out=rows[start : start + height])
        columns += block.sum(0)
    by_row, by_column = _positions(rows), _positions(columns)
    return (2 * address + 1) * int(rows.sum()) + 2 * (row_step * by_row + column_step * by_column)


def _positions(sums: torch.Tensor) -> int:
    """Σ_i i · sums_i mod 2^64."""
    return int((sums * torch.arange(sums.numel(), device=sums.device)).sum())


def unordered_sums(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Σ w and Σ w² mod 2^64 over the words of all tensors together: the same however elements are split and ordered."""
    total = squares = 0
    for tensor in tensors:
        for words in tensor.detach().contiguous().view(_WORDS[tensor.element_size()]).flatten().split(1 << 20):
            wide = words.to(torch.int64)
            total += int(wide.sum())
            squares += int((wide * wide).sum())
    return total & _MASK, squares & _MASK


def entry_key(rank: int, name: str) -> str:
    """Name under which `combine_checksums` takes an entry of a manifest."""
    return f"{rank}/{name}"


def combine_checksums(named: Iterable[tuple[str, int]]) -> int:
    """One checksum for a whole version from per-tensor checksums; independent of the order of names."""
    total = 0
    for name, checksum in named:
        mixed = checksum
        for byte in name.encode():
            mixed = ((mixed ^ byte) * _PRIME) & _MASK
        total = (total + mixed) & _MASK
    return total


def check_received(
    tensors: Mapping[str, torch.Tensor], entries: Iterable[TensorEntry], version: int, whose: str = ""
) -> None:
    """Compare the received tensors of a version with the manifest.

    Args:
        tensors: Received, by name.
        entries: Of the manifest.
        version: For the error message.
        whose: For the error message: the receiver.

    Raises:
        WeightSyncError: At the first difference.
    """
    for entry in entries:
        compare_received(tensor_checksum(tensors[entry.name]), entry, version, whose)


def compare_received(checksum: int, entry: TensorEntry, version: int, whose: str = "") -> None:
    """`check_received` for one tensor whose checksum is known."""
    if checksum != entry.checksum:
        raise WeightSyncError(
            f"publish v{version}: {entry.name}{whose} was received with checksum {checksum:x}, but sent with "
            f"{entry.checksum:x}. It was damaged in transfer, or overwritten by a newer version. The engine keeps "
            "serving the old weights."
        )
