"""`delta`: only the elements whose bits have changed since the version before, with their positions. Bit-exact.

Neighbours in bfloat16 are |w| / 256 … |w| / 128 apart, and an element changes only when its float32 master crosses from
one to the next: the smaller the learning rate, the fewer do. In float32 nearly all change. The values themselves are
sent, not their difference, so nothing is added and nothing can drift. Source: PULSE, arXiv 2602.03839.

Bits are compared: a NaN that stays is no change, and 0.0 to -0.0 is one.

Which k of the n elements, in the smaller of two lossless codings:

    bitmap  ⌈n / 8⌉ bytes   bit i % 8 of byte i // 8, least significant first
    gaps    k + e bytes     how many elements lie between neighbours; 255 stands for 255 elements and no position

e counts the escapes, Σ ⌊gap / 255⌋ ≤ n / 255. Above a density of about 1/8 the bitmap is less, below it the gaps. Gaps
of two bytes and plain positions would save only below 1/200, and there at most 0.2 % of the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.kernels.changed_elements import Changes, bits_of, find_changes
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
    """Implements `Codec`; k · itemsize bytes and the positions, or the whole buffer where that is less.

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
    """Changed elements, or everything if nothing is known of the receiver or if that is smaller."""
    if state.values is None:
        return whole(current, state.buffer, version)
    changes = find_changes(words(current), words(state.values))
    num_elements, num_changed, item_bytes = current.numel(), changes.num_changed, current.element_size()
    # Where a bitmap is not the smallest coding, seven elements of eight are unchanged: whole is out of the question.
    if (num_elements - num_changed) * item_bytes <= -(-num_elements // 8):
        return whole(current, state.buffer, version, num_changed)
    form, packed = pack_positions(changes)
    parts = {"values": changes.values().view(current.dtype), "positions": packed}
    dtype = DTYPE_NAMES[current.dtype]
    return Encoded(state.buffer, version, state.version, dtype, num_elements, form, parts, num_changed)


def _check_positions(encoded: Encoded, positions: Tensor, values: Tensor) -> None:
    """An index out of range would end a GPU process without a word.

    Raises:
        WeightSyncError: If the positions cannot be those that were sent.
    """
    first, last = (int(end) for end in torch.aminmax(positions)) if positions.numel() else (0, -1)
    if positions.numel() != values.numel() or first < 0 or last >= encoded.num_elements:
        raise WeightSyncError(
            f"publish v{encoded.version}: {encoded.buffer} arrived with {values.numel()} values for "
            f"{positions.numel()} positions in {first}..{last} of {encoded.num_elements} elements. It was damaged on "
            "the way; send it again."
        )


def pack_positions(changes: Changes) -> tuple[PositionForm, Tensor]:
    """The smaller coding's name, and a flat tensor of bytes."""
    size = -(-changes.num_elements // 8)
    if changes.num_changed < size:  # gaps have a byte per position, or more
        positions = changes.positions()
        gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
        ends = (gaps // _ESCAPE + 1).cumsum(0)
        num_entries = int(ends[-1]) if ends.numel() else 0
        if num_entries < size:  # each gap's remainder, after as many escapes as it needs
            entries = gaps.new_full((num_entries,), _ESCAPE)
            entries[ends - 1] = gaps % _ESCAPE
            return "gaps", entries.to(torch.uint8)
    return "bitmap", changes.bitmap()


def unpack_positions(form: PositionForm, packed: Tensor, num_elements: int) -> Tensor:
    """Inverse of `pack_positions`.

    Returns:
        `[k] int64`, increasing.
    """
    if form == "bitmap":
        return bits_of(packed, num_elements).nonzero().squeeze(1)
    gaps = packed.to(torch.int64)
    is_position = gaps != _ESCAPE
    return ((gaps + is_position).cumsum(0) - 1)[is_position]
