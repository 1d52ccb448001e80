"""`delta`: only the elements whose bits have changed since the version before, with their positions. Bit-exact.

Neighbouring bfloat16 numbers are |w| / 256 … |w| / 128 apart, and an element changes only if its float32 master weight
rounds to another one: the smaller the learning rate, the fewer do. In float32 nearly all change. The new values are
sent, not their difference, so nothing is added and nothing can drift. Source: PULSE, arXiv 2602.03839.

Bits are compared: an unchanged NaN is no change, and 0.0 to -0.0 is one.

The positions of the k changed among n elements, in the smaller of two lossless encodings:

    bitmap  ⌈n / 8⌉ bytes   bit i % 8 of byte i // 8, least significant first
    gaps    k + e bytes     the number of elements between neighbours; 255 stands for 255 elements and no position

e counts the escapes, Σ ⌊gap / 255⌋ ≤ n / 255. Above a density of about 1/8 the bitmap is smaller, below it the gaps.
Gaps of two bytes and plain positions would be smaller only below 1/200, and save at most 0.2 % of the buffer there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.codec.codec import (
    DTYPE_NAMES,
    Encoded,
    ReceiverState,
    SenderState,
    check_base,
    decode_whole,
    whole,
    words,
)

PositionForm = Literal["bitmap", "gaps"]
_ESCAPE = 255


@dataclass(frozen=True)
class DeltaCodec:
    """Implements `Codec`; k · itemsize bytes and the positions, or the whole buffer if that is smaller.

    Extra memory while encoding: n bytes, and up to about 48 bytes per changed element.
    """

    @torch.no_grad()
    def encode(self, current: Tensor, state: SenderState, version: int) -> Encoded:
        encoded = _difference(current, state, version)
        state.keep(version, current)
        return encoded

    @torch.no_grad()
    def decode(self, encoded: Encoded, state: ReceiverState, held: Tensor) -> None:
        if encoded.form == "whole" or encoded.form == "int8":
            decode_whole(encoded, state, held)
            return
        check_base(encoded, state)
        values = words(encoded.parts["values"])
        positions = unpack_positions(encoded.form, encoded.parts["positions"], encoded.num_elements)
        _check_positions(encoded, positions, values)
        words(held).index_copy_(0, positions, values)
        state.version = encoded.version


def _difference(current: Tensor, state: SenderState, version: int) -> Encoded:
    """Changed elements; all elements if the receiver's values are unknown or if that is smaller."""
    if state.values is None:
        return whole(current, state.buffer, version)
    is_changed = words(current) != words(state.values)
    num_elements, num_changed, item_bytes = current.numel(), int(is_changed.count_nonzero()), current.element_size()
    # If a bitmap is not the smallest encoding, seven of eight elements are unchanged, and `whole` is larger.
    if (num_elements - num_changed) * item_bytes <= -(-num_elements // 8):
        return whole(current, state.buffer, version, num_changed)
    form, packed = pack_positions(is_changed)
    parts = {"values": current[is_changed], "positions": packed}
    dtype = DTYPE_NAMES[current.dtype]
    return Encoded(state.buffer, version, state.version, dtype, num_elements, form, parts, num_changed)


def _check_positions(encoded: Encoded, positions: Tensor, values: Tensor) -> None:
    """Check the positions, since an index out of range would end a GPU process without an error message.

    Raises:
        WeightSyncError: If the positions cannot be those that were sent.
    """
    first, last = map(int, torch.aminmax(positions)) if positions.numel() else (0, -1)
    if positions.numel() != values.numel() or first < 0 or last >= encoded.num_elements:
        raise WeightSyncError(
            f"publish v{encoded.version}: {encoded.buffer} was received with {values.numel()} values for "
            f"{positions.numel()} positions in {first}..{last} of {encoded.num_elements} elements. It was damaged in "
            "transfer; send it again."
        )


def pack_positions(is_changed: Tensor) -> tuple[PositionForm, Tensor]:
    """Name of the smaller encoding of `[n] bool`, and a flat tensor of bytes."""
    size = -(-is_changed.numel() // 8)
    positions = is_changed.nonzero().squeeze(1)
    if len(positions) < size:  # gaps have a byte per position, or more
        gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
        stops = (gaps // _ESCAPE + 1).cumsum(0)
        num_entries = int(stops[-1]) if stops.numel() else 0
        if num_entries < size:  # each gap is its escapes and then the remainder
            entries = gaps.new_full((num_entries,), _ESCAPE)
            entries[stops - 1] = gaps % _ESCAPE
            return "gaps", entries.to(torch.uint8)
    return "bitmap", _bitmap(is_changed)


def _bitmap(is_changed: Tensor) -> Tensor:
    """`[⌈n / 8⌉] uint8`; the bits beyond n are 0."""
    padded = functional.pad(is_changed.view(torch.uint8), (0, -is_changed.numel() % 8)).view(-1, 8)
    packed = padded[:, 0].clone()
    for bit in range(1, 8):
        packed |= padded[:, bit] << bit
    return packed


def unpack_positions(form: PositionForm, packed: Tensor, num_elements: int) -> Tensor:
    """Inverse of `pack_positions`.

    Returns:
        `[k] int64`, increasing.
    """
    if form == "bitmap":
        bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
        return ((packed.unsqueeze(1) >> bits) & 1).flatten()[:num_elements].nonzero().squeeze(1)
    gaps = packed.to(torch.int64)
    is_position = gaps != _ESCAPE
    return ((gaps + is_position).cumsum(0) - 1)[is_position]
