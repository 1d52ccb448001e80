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

Form = Literal["whole", "bitmap", "gaps", "int8"]
"""What the parts hold: all values, changed values with their positions in one of two codings, or quantised steps."""
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
        assert self.version is None or version > self.version, f"{self.buffer}: v{version} after v{self.version}"
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
            current: `[n]` in the wire dtype, contiguous, of one size for all versions. Not changed.
            state: Of this buffer.
            version: Above the last one encoded.
        """
        ...

    def decode(self, encoded: Encoded, state: ReceiverState, held: Tensor) -> None:
        """Decode a version in place and note in `state` that it is held.

        Args:
            encoded: As it was sent, its parts on the device of `held`.
            state: Of this buffer.
            held: `[n]` in the wire dtype: the version that the receiver holds, then the new one. Anything, if it holds
                none.

        Raises:
            WeightSyncError: If the receiver holds another version than the base, or if parts are damaged. Nothing has
                been written then.
        """
        ...


def whole(values: Tensor, buffer: str, version: int, num_changed: int | None = None) -> Encoded:
    """Every element as it is. The part aliases `values`."""
    parts = {"values": values.detach()}
    return Encoded(buffer, version, None, DTYPE_NAMES[values.dtype], values.numel(), "whole", parts, num_changed)


def words(values: Tensor) -> Tensor:
    """The bits of `[n]` values as integers of the same width: NaN equals itself, and -0.0 is not 0.0."""
    return values.detach().view(_WORDS[values.dtype])


@dataclass(frozen=True)
class FullCodec:
    """`full`: every element, bit-exact; n · itemsize bytes. Needs no copy on the sender's side."""

    @torch.no_grad()
    def encode(self, current: Tensor, state: SenderState, version: int) -> Encoded:
        state.keep(version, None)  # nothing is compared later; a codec that compares starts with all elements
        return whole(current, state.buffer, version)

    @torch.no_grad()
    def decode(self, encoded: Encoded, state: ReceiverState, held: Tensor) -> None:
        decode_whole(encoded, state, held)


def decode_whole(encoded: Encoded, state: ReceiverState, held: Tensor) -> None:
    """As `Codec.decode`, of the form `whole`.

    Raises:
        WeightSyncError: As `Codec.decode`, and if it has another form.
    """
    check_base(encoded, state)
    if encoded.form != "whole":
        raise WeightSyncError(
            f"publish v{encoded.version}: {encoded.buffer} was sent as {encoded.form}, this receiver's codec does not "
            "read that. Give both sides the same codec."
        )
    held.copy_(check_part(encoded, "values", encoded.num_elements))
    state.version = encoded.version


def check_base(encoded: Encoded, state: ReceiverState) -> None:
    """A difference is to the version that the receiver holds.

    Raises:
        WeightSyncError: If it is to another.
    """
    if encoded.base_version is not None and encoded.base_version != state.version:
        holds = "no version" if state.version is None else f"v{state.version}"
        raise WeightSyncError(
            f"publish v{encoded.version}: {encoded.buffer} is the difference to v{encoded.base_version}, this receiver "
            f"holds {holds}: together they would be weights of no version. Send it `full`."
        )


def check_part(encoded: Encoded, name: str, num_elements: int) -> Tensor:
    """A part of the size that it must have.

    Raises:
        WeightSyncError: If it has another.
    """
    part = encoded.parts[name]
    if part.shape != (num_elements,):
        raise WeightSyncError(
            f"publish v{encoded.version}: {encoded.buffer}: part {name!r} arrived with shape {tuple(part.shape)}, "
            f"expected were {num_elements} elements. It was damaged on the way, or the two codecs are set differently."
        )
    return part
