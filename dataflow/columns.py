"""Payloads by column: each stage writes its own columns of many groups as one block; nobody rewrites another's.

    generation ─▶ token_ids, loss_mask, behavior_logprobs ─┐
    scoring    ─▶ reward                                   ├─▶ handle of a group ─▶ trainer ranks
    logprobs   ─▶ proximal_logprobs, reference_logprobs   ─┘

A block is immutable and lies in the object store; a handle names the blocks that hold a group's columns, and its place
in each. Handles are metadata, so they travel through the driver; arrays never do. A block lives until the last handle
of its groups is dropped: memory is bounded by the admission window, rounded up to whole blocks.

Nothing here knows Ray. `plan_read` says which blocks a reader needs, `read` cuts the groups out of them without a copy.

Shape legend: T = tokens of all trajectories of a block (packed, no padding), N = its trajectories, G = its groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import PenstockError, ShapeError

Array = NDArray[Any]


class Place(NamedTuple):
    """Where one group lies in a block: `[start, stop)` of its trajectories and of its tokens."""

    trajectories: slice
    tokens: slice


@dataclass(frozen=True, slots=True)
class Packing:
    """How groups lie in a block, one after another.

    Attributes:
        group_starts: `[G + 1] int64`, first trajectory of each group; last their number.
        token_starts: `[N + 1] int64`, first token of each trajectory; last their number.
    """

    group_starts: NDArray[np.int64]
    token_starts: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]]) -> Packing:
        """The packing of groups whose trajectories have these lengths, in tokens."""
        groups = accumulate((len(group) for group in lengths), initial=0)
        tokens = accumulate(chain.from_iterable(lengths), initial=0)
        return cls(np.fromiter(groups, np.int64), np.fromiter(tokens, np.int64))

    @property
    def num_groups(self) -> int:
        return len(self.group_starts) - 1

    @property
    def num_trajectories(self) -> int:
        return len(self.token_starts) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.token_starts[-1])

    def place(self, index: int) -> Place:
        """Of the block's `index`-th group."""
        first, last = self.group_starts[index : index + 2].tolist()
        return Place(slice(first, last), slice(*self.token_starts[[first, last]].tolist()))


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """What one stage wrote for some groups.

    Attributes:
        per_token: Name -> `[T]`.
        per_trajectory: Name -> `[N]`.
    """

    packing: Packing
    per_token: Mapping[str, Array]
    per_trajectory: Mapping[str, Array]

    def __post_init__(self) -> None:
        packing = self.packing
        for columns, length in ((self.per_token, packing.num_tokens), (self.per_trajectory, packing.num_trajectories)):
            for name, column in columns.items():
                if len(column) != length:
                    raise ShapeError(
                        f"columns: {name} has {len(column)} entries, its {packing.num_groups} groups have {length}. "
                        "A stage writes every token or trajectory that it was given, in the order given."
                    )

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.per_token, *self.per_trajectory)

    @property
    def num_bytes(self) -> int:
        return sum(column.nbytes for column in (*self.per_token.values(), *self.per_trajectory.values()))


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A stored block: an opaque reference that keeps it alive (a Ray ObjectRef, or the block itself)."""

    ref: Any
    names: tuple[str, ...]


class Piece(NamedTuple):
    """One group's columns in one block."""

    block: BlockRef
    slot: int


@dataclass(frozen=True, slots=True)
class ColumnHandle:
    """All that has been written of one group; the `handle` of its `GroupRef`."""

    pieces: tuple[Piece, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(chain.from_iterable(piece.block.names for piece in self.pieces))

    def joined(self, pieces: Iterable[Piece]) -> ColumnHandle:
        """This group with what other stages wrote of it.

        Raises:
            PenstockError: If a column is there already: two stages would disagree on what is trained.
        """
        handle = ColumnHandle((*self.pieces, *pieces))
        repeated = sorted({name for name in handle.names if handle.names.count(name) > 1})
        if repeated:
            raise PenstockError(f"columns: {', '.join(repeated)} would be written twice. Each column has one stage.")
        return handle


@dataclass(frozen=True, slots=True)
class GroupColumns:
    """One group's arrays: views of the blocks, read-only where the store is.

    Attributes:
        token_starts: `[n + 1] int64`, where each of its n trajectories begins in the per-token columns.
        columns: Name -> `[tokens of the group]` or `[n]`.
    """

    token_starts: NDArray[np.int64]
    columns: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]


Cut = tuple[tuple[int, int], ...]
"""How to cut one group out of fetched blocks: (which block, index of the group in it), once per block."""


def plan_read(handles: Sequence[ColumnHandle], names: Sequence[str]) -> tuple[list[Any], list[Cut]]:
    """What to fetch for the columns `names` of these groups: each block once, none that has only other columns.

    Returns:
        References of the blocks, and one cut per group.

    Raises:
        PenstockError: If a column of a group has not been written.
    """
    positions: dict[Any, int] = {}
    cuts: list[Cut] = []
    for handle in handles:
        missing = sorted(set(names).difference(handle.names))
        if missing:
            raise PenstockError(
                f"columns: {', '.join(missing)} not written yet; this group has {', '.join(handle.names) or 'none'}. "
                "A reader starts when the stages that it reads from have answered."
            )
        wanted = (piece for piece in handle.pieces if not set(names).isdisjoint(piece.block.names))
        cuts.append(tuple((positions.setdefault(piece.block.ref, len(positions)), piece.slot) for piece in wanted))
    return list(positions), cuts


def read(blocks: Sequence[ColumnBlock], cuts: Sequence[Cut], names: Sequence[str]) -> list[GroupColumns]:
    """The groups as views of the blocks; nothing is copied.

    Raises:
        ShapeError: If two stages disagree on the lengths of a group's trajectories.
    """
    return [_cut_out([(blocks[block], index) for block, index in cut], frozenset(names)) for cut in cuts]


def _cut_out(parts: Sequence[tuple[ColumnBlock, int]], names: frozenset[str]) -> GroupColumns:
    columns: dict[str, Array] = {}
    token_starts: NDArray[np.int64] | None = None
    for block, index in parts:
        trajectories, tokens = block.packing.place(index)
        starts = block.packing.token_starts[trajectories.start : trajectories.stop + 1] - tokens.start
        if token_starts is not None and not np.array_equal(starts, token_starts):
            raise ShapeError(
                f"columns: {', '.join(block.names)} are for trajectories of {np.diff(starts).tolist()} tokens, "
                f"{', '.join(columns)} for {np.diff(token_starts).tolist()}. They belong to different groups."
            )
        token_starts = starts
        columns |= {name: column[tokens] for name, column in block.per_token.items() if name in names}
        columns |= {name: column[trajectories] for name, column in block.per_trajectory.items() if name in names}
    assert token_starts is not None, "a cut has a block"
    return GroupColumns(token_starts, columns)
