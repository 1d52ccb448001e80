"""The codec interface of published weights: a buffer is encoded into tensors and decoded, with explicit states.

The sender's state is an exact copy of the values that every receiver holds, so a difference is always taken against the
values it will be added to. A receiver's state is the version it holds, which must be the base of the next message.
Invariant: after `encode` of v and `decode` of v, `SenderState.values` and the receiver's buffer have the same bits. So
with a lossy codec the checksum to publish is that of `SenderState.values`.

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
"""Content of the parts: all values, changed values with their positions in one of two encodings, or quantised steps."""
DTYPE_NAMES: Mapping[torch.dtype, DType] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One encoded buffer of one version: metadata, and flat tensors to be sent one after the other.

    Parts may alias the tensor that was encoded or the sender's state: send them before either changes.
    """

    buffer: str
    """Its name."""
    version: int
    """The version that the receiver holds after decoding."""
    base_version: int | None
    """The version that it must hold before; None for `whole`, which needs none."""
    dtype: DType
    """Of the wire, and of the buffers of sender and receiver."""
    num_elements: int
    """n."""
    form: Form
    """How to read `parts`."""
    parts: Mapping[str, Tensor] = field(repr=False)
    """Name -> `[...]` tensor."""
    num_changed: int | None = None
    """Elements whose bits differ from the base version; None if not measured."""

    @property
    def num_bytes(self) -> int:
        """Size of all parts, bytes. The transport counts the metadata, a few dozen bytes per buffer."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


@dataclass(slots=True, eq=False)
class SenderState:
    """The values that the receivers of one buffer hold."""

    buffer: str
    """Its name."""
    version: int | None = None
    """The last one encoded; None before the first."""
    values: Tensor | None = None
    """`[n]` in the wire dtype, a copy of its own; None if the codec keeps none. Costs n · itemsize bytes."""

    def keep(self, version: int, values: Tensor | None) -> None:
        """Record the version and values that receivers hold from now on."""
        assert self.version is None or version > self.version, f"{self.buffer}: v{version} after v{self.version}"
        self.version = version
        if values is None or self.values is None:
            self.values = None if values is None else values.detach().clone()
        else:
            self.values.copy_(values)


@dataclass(slots=True, eq=False)
class ReceiverState:
    """The version of one buffer that this receiver holds; None before the first."""

    buffer: str
    version: int | None = None


class Codec(Protocol):
    """Encodes versions of a buffer into messages and decodes them. Stateless: the state is passed in.

    A receiver decodes `whole` with any codec, so a sender may fall back to it for a buffer, or for a receiver that is
    behind.
    """

    def encode(self, current: Tensor, state: SenderState, version: int) -> Encoded:
        """Encode a version and record in `state` what receivers will hold.

        Args:
            current: `[n]` in the wire dtype, contiguous, of one size for all versions. Not changed.
            state: Of this buffer.
            version: Above the last one encoded.
        """
        ...

    def decode(self, encoded: Encoded, state: ReceiverState, held: Tensor) -> None:
        """Decode a version in place and record it in `state`.

        Args:
            encoded: The received message, its parts on the device of `held`.
            state: Of this buffer.
            held: `[n]` in the wire dtype: the version that the receiver holds, replaced by the new one. Any values if
                it holds none.

        Raises:
            WeightSyncError: If the receiver holds another version than the base, or if parts are damaged. Nothing is
                written then.
        """
        ...


def whole(values: Tensor, buffer: str, version: int, num_changed: int | None = None) -> Encoded:
    """All elements, unencoded. The part aliases `values`."""
    parts = {"values": values.detach()}
    return Encoded(buffer, version, None, DTYPE_NAMES[values.dtype], values.numel(), "whole", parts, num_changed)


def words(values: Tensor) -> Tensor:
    """The bits of `[n]` values as integers of the same width: NaN equals itself, and -0.0 is not 0.0."""
    return values.detach().view(_WORDS[values.dtype])


@dataclass(frozen=True)
class FullCodec:
    """`full`: every element, bit-exact; n · itemsize bytes. The sender keeps no copy."""

    @torch.no_grad()
    def encode(self, current: Tensor, state: SenderState, version: int) -> Encoded:
        state.keep(version, None)  # another codec that continues from this state sends all elements first
        return whole(current, state.buffer, version)

    @torch.no_grad()
    def decode(self, encoded: Encoded, state: ReceiverState, held: Tensor) -> None:
        decode_whole(encoded, state, held)


def decode_whole(encoded: Encoded, state: ReceiverState, held: Tensor) -> None:
    """`Codec.decode` for the form `whole`.

    Raises:
        WeightSyncError: As `Codec.decode`, and if it has another form.
    """
    check_base(encoded, state)
    if encoded.form != "whole":
        raise WeightSyncError(
            f"publish v{encoded.version}: {encoded.buffer} was sent as {encoded.form}, which this receiver's codec "
            "cannot decode. Use the same codec for sender and receiver."
        )
    held.copy_(check_part(encoded, "values", encoded.num_elements))
    state.version = encoded.version


def check_base(encoded: Encoded, state: ReceiverState) -> None:
    """Check that a difference has the version that the receiver holds as its base.

    Raises:
        WeightSyncError: If its base is another version.
    """
    if encoded.base_version is not None and encoded.base_version != state.version:
        holds = "no version" if state.version is None else f"v{state.version}"
        raise WeightSyncError(
            f"publish v{encoded.version}: {encoded.buffer} is the difference to v{encoded.base_version}, but this "
            f"receiver holds {holds}: their sum would be weights of no version. Send it `full`."
        )


def check_part(encoded: Encoded, name: str, num_elements: int) -> Tensor:
    """A part, checked to be of the expected size.

    Raises:
        WeightSyncError: If it has another size.
    """
    part = encoded.parts[name]
    if part.shape != (num_elements,):
        raise WeightSyncError(
            f"publish v{encoded.version}: {encoded.buffer}: part {name!r} was received with shape {tuple(part.shape)}, "
            f"but {num_elements} elements were expected. It was damaged in transfer, or the codecs of sender and "
            "receiver differ."
        )
    return part
