"""What an actor has for its client, handed over in batches: the cost in Ray calls does not grow with the parcels."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Parcel = TypeVar("Parcel")


class Outbox(Generic[Parcel]):
    """Parcels of one actor, in order. Bounded by what its client has asked for and not yet collected."""

    def __init__(self) -> None:
        self._parcels: list[Parcel] = []
        self._has_parcels = asyncio.Event()

    def send(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._has_parcels.set()

    async def collect(self, wait_s: float) -> list[Parcel]:
        """Everything sent since the last call; waits at most `wait_s` seconds for the first of it."""
        try:
            await asyncio.wait_for(self._has_parcels.wait(), wait_s)
        except TimeoutError:
            return []
        self._has_parcels.clear()
        parcels, self._parcels = self._parcels, []
        return parcels
