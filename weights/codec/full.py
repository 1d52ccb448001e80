"""`full`: every element, bit-exact. Needs no copy on the sender's side, and nothing from the receiver."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.codec.checks import check_part, check_receivable, check_sendable
from penstock.weights.codec.codec import Encoded, ReceiverState, SenderState, whole


@dataclass(frozen=True)
class FullCodec:
    """Implements `Codec`; n · itemsize bytes."""

    @torch.no_grad()
    def encode(self, current: Tensor, state: SenderState, version: int) -> Encoded:
        check_sendable(current, state, version)
        state.keep(version, None)  # nothing is compared later; a codec that compares starts with all elements
        return whole(current, state.buffer, version)

    @torch.no_grad()
    def decode(self, encoded: Encoded, state: ReceiverState, previous: Tensor, *, out: Tensor | None = None) -> Tensor:
        return decode_whole(encoded, state, previous, out)


def decode_whole(encoded: Encoded, state: ReceiverState, previous: Tensor, out: Tensor | None) -> Tensor:
    """As `Codec.decode`, of the form `whole`.

    Raises:
        WeightSyncError: As `Codec.decode`, and if it has another form.
    """
    check_receivable(encoded, state, previous)
    if encoded.form != "whole":
        raise WeightSyncError(
            f"publish v{encoded.version}: {encoded.buffer} was sent as {encoded.form}, this receiver's codec does not "
            "read that. Give both sides the same codec."
        )
    values = check_part(encoded, "values", encoded.num_elements)
    target = torch.empty_like(previous) if out is None else out
    target.copy_(values)
    state.version = encoded.version
    return target
