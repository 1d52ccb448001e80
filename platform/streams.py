"""Batches that are already there, as the streams that trainers consume."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from penstock.dataflow.trajectory import GroupRef


async def stream_of(groups: Sequence[GroupRef]) -> AsyncIterator[GroupRef]:
    """The groups, one by one."""
    for group in groups:
        yield group
