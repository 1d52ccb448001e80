"""What must hold before a version is encoded or decoded: checked before anything is written."""

from __future__ import annotations

from torch import Tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.codec.codec import DTYPE_NAMES, Encoded, ReceiverState, SenderState
from penstock.weights.dtypes import TORCH_DTYPES


def check_sendable(current: Tensor, state: SenderState, version: int) -> None:
    """What must hold before a version is encoded.

    Raises:
        WeightSyncError: As `Codec.encode`.
    """
    assert state.version is None or version > state.version, f"{state.buffer}: v{version} after v{state.version}"
    if current.ndim != 1 or not current.is_contiguous() or current.dtype not in DTYPE_NAMES:
        raise WeightSyncError(
            f"publish v{version}: {state.buffer} is {tuple(current.shape)} {current.dtype}, codecs take flat "
            f"contiguous tensors of {' or '.join(TORCH_DTYPES)}. Flatten it and cast it to the wire dtype before."
        )
    held = state.values
    if held is not None and (held.shape != current.shape or held.dtype != current.dtype):
        raise WeightSyncError(
            f"publish v{version}: {state.buffer} has {current.numel()} elements of {current.dtype}, v{state.version} "
            f"had {held.numel()} of {held.dtype}. The layout has changed: start with a new SenderState."
        )


def check_receivable(encoded: Encoded, state: ReceiverState, previous: Tensor) -> None:
    """What must hold before a version is decoded.

    Raises:
        WeightSyncError: As `Codec.decode`.
    """
    what = f"publish v{encoded.version}: {encoded.buffer}"
    if state.buffer != encoded.buffer:
        raise WeightSyncError(f"{what} arrived where {state.buffer} was expected. Sender and receiver differ in order.")
    if previous.shape != (encoded.num_elements,) or previous.dtype != TORCH_DTYPES[encoded.dtype]:
        raise WeightSyncError(
            f"{what} was sent with {encoded.num_elements} elements of {encoded.dtype}, the receiver has "
            f"{tuple(previous.shape)} {previous.dtype}. The two sides were planned for different layouts."
        )
    if encoded.base_version is not None and encoded.base_version != state.version:
        held = "no version" if state.version is None else f"v{state.version}"
        raise WeightSyncError(
            f"{what} is the difference to v{encoded.base_version}, this receiver holds {held}: together they would be "
            "weights of no version. Send it `full` (catch_up)."
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
