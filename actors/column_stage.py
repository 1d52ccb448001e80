"""Stages of the dataflow as Ray actors: a call carries many groups, arrays stay in the object store.

A call has two results. The block is owned by the driver, so it outlives the worker that wrote it; the small notes (one
per group) come back inline. Blocks that a stage reads are arguments of its call: Ray brings them to the worker's node
while it is still busy with the call before, and the worker maps them without a copy.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle

from penstock.dataflow.columns import BlockRef, ColumnBlock, ColumnHandle, Cut, GroupColumns, Piece, plan_read, read
from penstock.dataflow.errors import PenstockError

Note = Any
"""What the driver must know of one group: a small value, never an array."""
Reply = tuple[ColumnBlock, tuple[tuple[str, ...], list[Note]]]


class Source(Protocol):
    """Begins groups: makes their first columns from orders (tasks, group ids)."""

    def begin(self, orders: Sequence[Any]) -> tuple[ColumnBlock, list[Note]]: ...


class Stage(Protocol):
    """Adds columns to groups.

    Attributes:
        reads: The columns it needs.
    """

    reads: tuple[str, ...]

    def extend(self, groups: Sequence[GroupColumns]) -> tuple[ColumnBlock, list[Note]]: ...


class SourceWorker:
    """A process around a source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @ray.method(num_returns=2)
    def write(self, orders: list[Any]) -> Reply:
        block, notes = self._source.begin(orders)
        return block, (block.names, notes)


class StageWorker:
    """A process around a stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @ray.method(num_returns=2)
    def write(self, cuts: list[Cut], *blocks: ColumnBlock) -> Reply:
        block, notes = self._stage.extend(read(blocks, cuts, self._stage.reads))
        return block, (block.names, notes)


class ColumnWriters:
    """The workers of one stage, in turn; `workers` are `SourceWorker`s or `StageWorker`s that read `reads`.

    Consumes: calls of many groups. Waits for: the notes. Unblocked by: the worker's answer, its death, the time limit.
    """

    def __init__(self, name: str, workers: Sequence[ActorHandle], reads: tuple[str, ...], timeout_s: float) -> None:
        self._name = name
        self._next_worker = itertools.cycle(workers)
        self._reads = reads
        self._timeout_s = timeout_s

    async def begin(self, orders: Sequence[Any]) -> list[tuple[Piece, Note]]:
        """Begin one group per order, in one call.

        Raises:
            PenstockError: If the call fails, its worker dies or it takes longer than the time limit.
        """
        return await self._write(len(orders), list(orders))

    async def extend(self, handles: Sequence[ColumnHandle]) -> list[tuple[Piece, Note]]:
        """Add this stage's columns to these groups, in one call.

        Raises:
            PenstockError: As `begin`, and if a column that the stage reads is not there yet.
        """
        refs, cuts = plan_read(handles, self._reads)
        return await self._write(len(handles), cuts, *refs)

    async def _write(self, num_groups: int, *arguments: Any) -> list[tuple[Piece, Note]]:
        block, reply = next(self._next_worker).write.remote(*arguments)
        try:
            async with asyncio.timeout(self._timeout_s):
                names, notes = await reply
        except TimeoutError:
            raise PenstockError(
                f"{self._name}: no answer for {num_groups} groups within {self._timeout_s:.0f} s. "
                "The worker hangs, or the call is too large: send fewer groups per call."
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise PenstockError(f"{self._name}: {type(error.cause).__name__}: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise PenstockError(f"{self._name}: the worker died: {str(error).splitlines()[0]}") from error
        if len(notes) != num_groups:
            raise PenstockError(f"{self._name}: {len(notes)} notes for {num_groups} groups; a stage answers for each.")
        written = BlockRef(block, names)
        return [(Piece(written, index), note) for index, note in enumerate(notes)]
