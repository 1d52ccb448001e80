"""`delta`: only the elements whose bits have changed since the version before, with their positions. Bit-exact.

Neighbours in bfloat16 are |w| / 256 … |w| / 128 apart, and an element changes only when its float32 master crosses from
one to the next: the smaller the learning rate, the fewer do. In float32 nearly all change. The values themselves are
sent, not their difference, so nothing is added and nothing can drift. Source: PULSE, arXiv 2602.03839.

Bits are compared: a NaN that stays is no change, and 0.0 to -0.0 is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.kernels.changed_elements import find_changes
from penstock.weights.codec.checks import check_receivable, check_sendable
from penstock.weights.codec.codec import (
    DTYPE_NAMES,
    Encoded,
    ReceiverState,
    SenderState,
    whole,
    words,
)
from penstock.weights.codec.full import decode_whole
from penstock.weights.codec.positions import bitmap_bytes, pack_positions, unpack_positions


@dataclass(frozen=True)
class DeltaCodec:
    """Implements `Codec`; k · itemsize bytes and the positions, or the whole buffer where that is less.

    Extra memory while encoding: n bytes, and up to about 48 bytes per changed element.
    """

    @torch.no_grad()
    def encode(self, current: Tensor, state: SenderState, version: int) -> Encoded:
        check_sendable(current, state, version)
        encoded = _difference(current, state, version)
        state.keep(version, current)
        return encoded

    @torch.no_grad()
    def decode(self, encoded: Encoded, state: ReceiverState, previous: Tensor, *, out: Tensor | None = None) -> Tensor:
        if encoded.form == "whole" or encoded.form == "int8":
            return decode_whole(encoded, state, previous, out)
        check_receivable(encoded, state, previous)
        values = words(encoded.parts["values"])
        positions = unpack_positions(encoded.form, encoded.parts["positions"], encoded.num_elements)
        _check_positions(encoded, positions, values)
        target = torch.empty_like(previous) if out is None else out
        if target is not previous:
            target.copy_(previous)
        words(target).index_copy_(0, positions, values)
        state.version = encoded.version
        return target


def _difference(current: Tensor, state: SenderState, version: int) -> Encoded:
    """Changed elements, or everything if nothing is known of the receiver or if that is smaller."""
    if state.values is None:
        return whole(current, state.buffer, version)
    changes = find_changes(words(current), words(state.values))
    num_elements, num_changed, item_bytes = current.numel(), changes.num_changed, current.element_size()
    # Where a bitmap is not the smallest coding, seven elements of eight are unchanged: whole is out of the question.
    if (num_elements - num_changed) * item_bytes <= bitmap_bytes(num_elements):
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
