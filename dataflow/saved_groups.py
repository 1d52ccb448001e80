"""What a checkpoint keeps of groups that are not trained yet, and its form on disk.

A ready group is a `GroupPayload`. Of an open group each member is kept as far as it has come: scored, sampled but not
scored, or some tokens of a single turn. An episode in progress is not kept, since its environment's state is not.

A record on disk is a JSON header, the arrays that it names, and a CRC-32 of both, so that a torn file is never read:

    length of the header, u64 | header: {"format", "arrays": [[dtype, shape], …], "value"} | arrays | crc32, u32
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import CheckpointError, FailureKind
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.trajectory import (
    Alternatives,
    Episode,
    GroupPayload,
    Routes,
    Thread,
    Trajectory,
    Turn,
    joined_routes,
)
from penstock.dataflow.versions import Span, Spans, join_spans

FORMAT = 3
"""Version of the form on disk, the only one that is read."""


# Not frozen, as `Trajectory`: one is made for each member at each checkpoint, in the driver's event loop.
@dataclass(slots=True)
class PartialTokens:
    """The tokens of a turn that is being sampled."""

    token_ids: NDArray[np.int32]
    """`[n] int32`."""
    logprobs: NDArray[np.float32]
    """`[n] float32`, behavior logprobs."""
    spans: Spans
    """Version spans of the n tokens."""
    alternatives: Alternatives | None = None
    """Of the n tokens; None if they were sampled from the whole vocabulary."""
    routes: Routes | None = None
    """As in `TokenDelta`."""

    @classmethod
    def of(cls, deltas: Sequence[TokenDelta]) -> PartialTokens:
        return cls(
            np.array(list(chain.from_iterable(delta.token_ids for delta in deltas)), np.int32),
            np.array(list(chain.from_iterable(delta.logprobs for delta in deltas)), np.float32),
            join_spans([span for delta in deltas for span in delta.spans]),
            Alternatives.joined(delta.alternatives for delta in deltas),
            joined_routes(delta.routes for delta in deltas),
        )

    def delta(self) -> TokenDelta:
        """The tokens as one delta."""
        ids, logprobs = tuple(self.token_ids.tolist()), tuple(self.logprobs.tolist())
        return TokenDelta(ids, logprobs, self.spans, alternatives=self.alternatives, routes=self.routes)


@dataclass(slots=True)
class Failure:
    """A failed attempt of a member."""

    kind: FailureKind
    detail: str
    is_final: bool = False


@dataclass(slots=True)
class MemberProgress:
    """How far one trajectory of an open group has come."""

    trajectory: Trajectory | None = None
    """Sampled to its end; with a reward if it is scored."""
    deltas: tuple[TokenDelta, ...] = ()
    """The tokens so far of a single turn, as they came; empty for episodes. `packed` makes `partial` of them."""
    partial: PartialTokens | None = None
    """The same as arrays; None if there are none."""
    failures: tuple[Failure, ...] = ()
    """Its failed attempts, oldest first. If it has failed for good, the last one is its outcome."""
    has_failed: bool = False
    """Whether it has failed for good."""


@dataclass(slots=True)
class OpenGroup:
    """A group whose trajectories are being sampled or scored."""

    group_id: GroupId
    members: tuple[MemberProgress, ...]
    is_judged: bool = False
    """Whether the filters and the hooks of the task queue have seen it."""

    def packed(self) -> OpenGroup:
        """With arrays instead of deltas. Not done in the event loop, where it would cost seconds for long turns."""
        members = tuple(
            [replace(m, deltas=(), partial=PartialTokens.of(m.deltas) if m.deltas else m.partial) for m in self.members]
        )
        return replace(self, members=members)


_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Alternatives,
        Episode,
        Failure,
        GroupPayload,
        MemberProgress,
        OpenGroup,
        PartialTokens,
        Span,
        Thread,
        Trajectory,
        Turn,
    )
}


def encode(value: Any) -> bytes:
    """Encode a value that consists of the classes above, arrays, tuples, mappings and JSON scalars."""
    arrays: list[NDArray[Any]] = []
    described = _describe(value, arrays)
    layout = [[array.dtype.str, list(array.shape)] for array in arrays]
    header = json.dumps({"format": FORMAT, "arrays": layout, "value": described}, separators=(",", ":")).encode()
    body = b"".join([struct.pack("<Q", len(header)), header, *(np.ascontiguousarray(array).data for array in arrays)])
    return body + struct.pack("<I", zlib.crc32(body))


def decode(data: bytes, where: str) -> Any:
    """Decode what `encode` returned. Tuples and lists come back as tuples.

    Args:
        data: Content of one file.
        where: Its path, for messages.

    Raises:
        CheckpointError: If the data are torn, damaged or of another format.
    """
    if len(data) < 12 or zlib.crc32(memoryview(data)[:-4]) != struct.unpack("<I", data[-4:])[0]:
        raise CheckpointError(
            f"{where}: its checksum does not match its {len(data)} bytes: it was torn or damaged. Nothing of it is "
            "used. Resume from an older checkpoint."
        )
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    if header["format"] != FORMAT:
        raise CheckpointError(
            f"{where}: has format {header['format']}, and this version of Penstock reads format {FORMAT}. Resume with "
            "the version that wrote it."
        )
    arrays: list[NDArray[Any]] = []
    offset = 8 + length
    for dtype, shape in header["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        # Copied, because torch needs aligned, writable memory.
        arrays.append(np.frombuffer(data, np.dtype(dtype), count, offset).reshape(shape).copy())
        offset += arrays[-1].nbytes
    return _rebuild(header["value"], arrays)


def _describe(value: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"@": "array", "of": len(arrays) - 1}
    if isinstance(value, Span):
        return {"@": "Span", "of": list(value)}
    if is_dataclass(value):
        content = {one.name: _describe(getattr(value, one.name), arrays) for one in fields(value) if one.init}
        return {"@": type(value).__name__, "of": content}
    if isinstance(value, Mapping):
        return {"@": "map", "of": {name: _describe(item, arrays) for name, item in value.items()}}
    if isinstance(value, tuple | list):
        return [_describe(item, arrays) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _rebuild(described: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(described, list):
        return tuple([_rebuild(item, arrays) for item in described])
    if not isinstance(described, dict):
        return described
    name, content = described["@"], described["of"]
    if name == "array":
        return arrays[content]
    if name == "Span":
        return Span(*content)
    values = {key: _rebuild(item, arrays) for key, item in content.items()}
    return values if name == "map" else _TYPES[name](**values)
