"""What a codec of published weights is: one buffer in, plain tensors out, and back, with explicit states on both sides.

The sender's state is what every receiver of its stream holds, bit for bit, so a difference is always taken against what
it will be added to. The receiver keeps one number, the version it holds, which must be the base of what arrives.
Invariant: after `encode` of v and `decode` of v, `SenderState.values` and the receiver's buffer have the same bits. So
the checksum to announce beside a lossy codec is that of `SenderState.values`.

Shape legend: n elements of a buffer, k of them changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.model_config import DType

Form = Literal["whole", "bitmap", "int32", "gaps8", "gaps16", "int8"]
"""What the parts hold: all values, changed values with their positions in one of four codings, or quantised steps."""
DTYPE_NAMES: Mapping[torch.dtype, DType] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One buffer of one version as it travels: metadata, and flat tensors to be sent one after the other.

    Parts may alias the tensor that was encoded or the sender's state: send them before either changes.

    Attributes:
        buffer: Its name.
        version: What the receiver holds afterwards.
        base_version: What it must hold before; None for `whole`, which needs nothing.
        dtype: Of the wire, hence of the buffer on both sides.
        num_elements: n.
        form: How to read `parts`.
        parts: Name -> `[...]` tensor.
        num_changed: Elements whose bits differ from the base version; None where that was not measured.
    """

    buffer: str
    version: int
    base_version: int | None
    dtype: DType
    num_elements: int
    form: Form
    parts: Mapping[str, Tensor] = field(repr=False)
    num_changed: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all parts, bytes. The metadata, some dozen bytes per buffer, is the transport's to count."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


@dataclass(slots=True, eq=False)
class SenderState:
    """What the receivers of one buffer hold.

    Attributes:
        buffer: Its name.
        version: The last one encoded; None before the first.
        values: `[n]` in the wire dtype, a copy of its own; None where the codec keeps none. Costs n · itemsize bytes.
    """

    buffer: str
    version: int | None = None
    values: Tensor | None = None

    def keep(self, version: int, values: Tensor | None) -> None:
        """Note what receivers hold from now on."""
        self.version = version
        if values is None or self.values is None:
            self.values = None if values is None else values.detach().clone()
        else:
            self.values.copy_(values)


@dataclass(slots=True, eq=False)
class ReceiverState:
    """Which version of one buffer this receiver holds; None before the first."""

    buffer: str
    version: int | None = None


class Codec(Protocol):
    """Turns versions of a buffer into messages and back. Stateless: everything that lasts is in the two states.

    A receiver decodes `whole` with any codec, so a sender may fall back to it for a buffer, or catch one receiver up.
    """

    def encode(self, current: Tensor, state: SenderState, version: int) -> Encoded:
        """Encode a version and note in `state` what receivers will hold.

        Args:
            current: `[n]` in the wire dtype, contiguous. Not changed.
            state: Of this buffer.
            version: Above the last one encoded.

        Raises:
            WeightSyncError: If the tensor is not flat, of no wire dtype, or of another size or dtype than before.
        """
        ...

    def decode(self, encoded: Encoded, state: ReceiverState, previous: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Decode a version and note in `state` that it is held.

        Args:
            encoded: As it was sent, its parts on the device of `previous`.
            state: Of this buffer.
            previous: `[n]` in the wire dtype: the version that the receiver holds. Anything, if it holds none.
            out: Where to write; `previous` itself for in place, None for a new tensor.

        Returns:
            `[n]`, `out` if given.

        Raises:
            WeightSyncError: If the receiver holds another version than the base, or if sizes or dtypes do not agree.
                Nothing has been written then.
        """
        ...


def catch_up(state: SenderState) -> Encoded:
    """All of what the other receivers hold, for one that has missed versions: afterwards it follows their stream.

    Raises:
        WeightSyncError: If the sender keeps no values, because its codec sends everything every time.
    """
    if state.version is None or state.values is None:
        raise WeightSyncError(
            f"{state.buffer}: there is nothing to catch up with: the sender keeps no copy of what receivers hold. "
            "Publish the next version instead; it holds every element."
        )
    return whole(state.values, state.buffer, state.version)


def whole(values: Tensor, buffer: str, version: int, num_changed: int | None = None) -> Encoded:
    """Every element as it is. The part aliases `values`."""
    parts = {"values": values.detach()}
    return Encoded(buffer, version, None, DTYPE_NAMES[values.dtype], values.numel(), "whole", parts, num_changed)


def words(values: Tensor) -> Tensor:
    """The bits of `[n]` values as integers of the same width: NaN equals itself, and -0.0 is not 0.0."""
    return values.detach().view(_WORDS[values.dtype])
