"""Codecs by name, and encoded buffers as bytes: a header of fixed size, then the parts, one after the other.

The header tells the receiver how many bytes follow. Header, int64: form, version, base version, changed elements, bytes
of each of up to two parts; -1 stands for none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.codec.codec import DTYPE_NAMES, Codec, Encoded, Form, FullCodec
from penstock.weights.codec.delta import DeltaCodec
from penstock.weights.codec.int8_delta import Int8DeltaCodec
from penstock.weights.config import CodecName
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.model_config import DType

HEADER_WORDS = 6
_FORMS: tuple[Form, ...] = get_args(Form)
_NONE = -1
CODECS: Mapping[CodecName, Codec] = {"full": FullCodec(), "delta": DeltaCodec(), "int8_delta": Int8DeltaCodec()}


def to_wire(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """Header `[HEADER_WORDS] int64` and payload `[bytes] uint8`, a copy of the parts; both on the parts' device."""
    parts = [_bytes(encoded.parts[name]) for name in _part_dtypes(encoded.form, encoded.dtype)]
    sizes = [part.numel() for part in parts] + [_NONE] * (2 - len(parts))
    header = [
        _FORMS.index(encoded.form),
        encoded.version,
        _NONE if encoded.base_version is None else encoded.base_version,
        _NONE if encoded.num_changed is None else encoded.num_changed,
        *sizes,
    ]
    payload = torch.cat(parts)
    return torch.tensor(header, dtype=torch.int64, device=payload.device), payload


def payload_bytes(header: Tensor) -> int:
    """Bytes that follow a header."""
    return sum(max(int(size), 0) for size in header[-2:])


def from_wire(header: Tensor, payload: Tensor, buffer: str, dtype: torch.dtype, num_elements: int) -> Encoded:
    """Inverse of `to_wire`; the parts alias `payload`.

    Args:
        header: `[HEADER_WORDS] int64`.
        payload: `[payload_bytes(header)] uint8`.
        buffer: Name of the expected buffer.
        dtype: Of the wire.
        num_elements: Of the expected buffer.

    Raises:
        WeightSyncError: If the header is invalid.
    """
    form, version, base, changed, *sizes = header.tolist()
    if not 0 <= form < len(_FORMS):
        raise WeightSyncError(
            f"publish: {buffer} was received in form {form}, known are 0..{len(_FORMS) - 1}. It was damaged in "
            "transfer, or sender and receiver run different versions of Penstock."
        )
    name = DTYPE_NAMES[dtype]
    parts, start = {}, 0
    for (part, kind), size in zip(_part_dtypes(_FORMS[form], name).items(), sizes, strict=False):
        piece = payload[start : start + size]
        is_aligned = piece.storage_offset() % kind.itemsize == 0  # a part of single bytes may precede this one
        parts[part] = (piece if is_aligned else piece.clone()).view(kind)
        start += size
    return Encoded(
        buffer=buffer,
        version=version,
        base_version=None if base == _NONE else base,
        dtype=name,
        num_elements=num_elements,
        form=_FORMS[form],
        parts=parts,
        num_changed=None if changed == _NONE else changed,
    )


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8) if part.numel() else part.new_empty(0, dtype=torch.uint8)


def _part_dtypes(form: Form, dtype: DType) -> dict[str, torch.dtype]:
    """The parts of a form, in the order in which they are sent."""
    values = TORCH_DTYPES[dtype]
    if form == "whole":
        return {"values": values}
    if form == "int8":
        return {"scales": torch.float32, "steps": torch.int8}
    return {"values": values, "positions": torch.uint8}
