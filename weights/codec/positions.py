"""Which elements have changed, in few bytes: four codings of k increasing positions among n, losslessly.

    bitmap  ⌈n / 8⌉ bytes      bit i % 8 of byte i // 8, least significant first
    int32   4 k bytes          the positions
    gaps8   k + e bytes        how many elements lie between neighbours; 255 stands for 255 elements and no position
    gaps16  2 (k + e) bytes    the same with 65535

e counts the escapes, Σ ⌊gap / (2^b − 1)⌋. Above a density of about 1/8 the bitmap is least, below it `gaps8` down to
about 1/200, then `gaps16`, and `int32` only where gaps are mostly longer than 65535.
16-bit gaps lie in int16 tensors, since not every process-group backend knows uint16: their bits are what counts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.changed_elements import Changes
from penstock.kernels.portable.changed_elements import bits_of

PositionForm = Literal["bitmap", "int32", "gaps8", "gaps16"]
_GAP_DTYPES: dict[PositionForm, tuple[int, torch.dtype]] = {
    "gaps8": (255, torch.uint8),
    "gaps16": (65535, torch.int16),
}
_INT32_LIMIT = 1 << 31


def bitmap_bytes(num_elements: int) -> int:
    """Size of the bitmap, and the most that `pack_positions` gives."""
    return -(-num_elements // 8)


def pack_positions(changes: Changes) -> tuple[PositionForm, Tensor]:
    """The smallest coding, the first of equals in the order above.

    Returns:
        Its name and a flat tensor.
    """
    num_elements = changes.num_elements
    sizes: dict[PositionForm, int] = {"bitmap": bitmap_bytes(num_elements)}
    if changes.num_changed >= sizes["bitmap"]:
        return "bitmap", changes.bitmap()  # every other coding has a byte per position, or more
    positions = changes.positions()
    if num_elements <= _INT32_LIMIT:
        sizes["int32"] = 4 * positions.numel()
    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    for form, (escape, dtype) in _GAP_DTYPES.items():
        sizes[form] = dtype.itemsize * (gaps.numel() + int((gaps // escape).sum()))
    best = min(sizes, key=sizes.__getitem__)
    if best == "bitmap":
        return best, changes.bitmap()
    if best == "int32":
        return best, positions.to(torch.int32)
    return best, _pack_gaps(gaps, *_GAP_DTYPES[best])


def unpack_positions(form: PositionForm, packed: Tensor, num_elements: int) -> Tensor:
    """Inverse of `pack_positions`.

    Returns:
        `[k] int64`, increasing.
    """
    if form == "bitmap":
        return bits_of(packed, num_elements).nonzero().squeeze(1)
    if form == "int32":
        return packed.to(torch.int64)
    escape, _ = _GAP_DTYPES[form]
    gaps = packed.to(torch.int64) & escape
    is_position = gaps != escape
    return ((gaps + is_position).cumsum(0) - 1)[is_position]


def _pack_gaps(gaps: Tensor, escape: int, dtype: torch.dtype) -> Tensor:
    """`[k] int64` gaps -> `[k + e]`: each gap's remainder, after as many escapes as it needs."""
    ends = (gaps // escape + 1).cumsum(0)
    num_entries = int(ends[-1]) if ends.numel() else 0
    entries = gaps.new_full((num_entries,), escape)
    entries[ends - 1] = gaps % escape
    return entries.to(dtype)  # keeps the low bits
