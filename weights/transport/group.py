"""Membership in a transfer between processes: meeting at the store, connections, and the end of both.

Made from an address and a group rank, without the global state of torch.distributed. When an engine joins or leaves, or
is lost, everyone closes and joins a group of the next generation, of other members, at the same store.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.dataflow.errors import WeightSyncError, boundary
from penstock.weights.transport.links import Links, connect, connect_store, meet
from penstock.weights.transport.members import Members

_LOST = "lost: "


class TransferGroup:
    """One process's membership.

    Invariant: every member carries out the same transfers in the same order; what each is about to do is compared
    before the first bucket.
    """

    def __init__(
        self, store: Store, members: Members, rank: int, timeout_s: float, device: torch.device, links: Links
    ) -> None:
        """See `join`."""
        self.members = members
        self.rank = rank
        self.timeout_s = timeout_s
        self.device = device
        self._store = store
        self._links: Links | None = links
        self._num_meetings = 0

    @classmethod
    def join(
        cls,
        store_at: tuple[str, int],
        members: Members,
        rank: int,
        *,
        timeout_s: float,
        generation: int = 0,
        device: str | torch.device = "cpu",
    ) -> TransferGroup:
        """Meet all members and connect to them.

        Args:
            store_at: Host and port of the store's server (`links.serve_store`).
            members: Everyone.
            rank: This process's group rank.
            timeout_s: Longest wait for everyone, and then for each message, seconds.
            generation: A number that no earlier group at this store has.
            device: Where messages are packed: `cpu` is gloo, `cuda:<index>` is NCCL.

        Raises:
            WeightSyncError: If someone does not come, who is named.
        """
        device = torch.device(device)
        store = PrefixStore(f"group{generation}", connect_store(*store_at, timeout_s))
        what = f"weights: {members.name(rank)} joins group {generation}"
        with boundary(WeightSyncError, what):
            missing, _ = meet(store, "join", rank, members.world_size, "", timeout_s)
            if missing:
                raise WeightSyncError(f"{what}: {_absent(members, missing, timeout_s)}")
            links = connect(store, rank, members.world_size, timeout_s, device, store_at)
        return cls(store, members, rank, timeout_s, device, links)

    @property
    def links(self) -> Links:
        """Connections to the others.

        Raises:
            WeightSyncError: If the group is over.
        """
        if self._links is None:
            raise WeightSyncError(
                f"weights: {self.members.name(self.rank)} has closed its group. Join one of the next generation."
            )
        return self._links

    def meet(self, what: str, plan: str) -> None:
        """Wait until every member is about to do the same.

        Raises:
            WeightSyncError: If someone does not come, or is about to do something else.
        """
        here = f"{what} {plan}"
        key = f"ready{self._num_meetings}"
        missing, brought = meet(self._store, key, self.rank, self.members.world_size, here, self.timeout_s)
        if missing:
            raise WeightSyncError(f"{what}: {_absent(self.members, missing, self.timeout_s)}")
        for rank, there in enumerate(brought):
            if there.startswith(_LOST):
                raise WeightSyncError(f"{what}: {self.members.name(rank)} is lost. {there.removeprefix(_LOST)}")
            if there != here:
                raise WeightSyncError(
                    f"{what}: {self.members.name(rank)} is about to transfer {there}, {self.members.name(self.rank)} "
                    f"{here}. All members must carry out the same transfers in the same order."
                )
        if self._num_meetings:  # everyone has read the one before
            self._store.delete_key(f"ready{self._num_meetings - 1}/{self.rank}")
        self._num_meetings += 1

    @staticmethod
    def interrupt(store: Store, generation: int, num_meetings: int, members: Members, cause: str) -> None:
        """Let nobody wait any longer for those who have not come to a meeting; called by who serves the store.

        Args:
            store: Its server.
            generation: Of the group.
            num_meetings: Before the one that is waited for.
            members: Of the group.
            cause: Why they will not come.
        """
        store = PrefixStore(f"group{generation}", store)
        for rank in range(members.world_size):
            store.compare_set(f"ready{num_meetings}/{rank}", "", f"{_LOST}{cause}")

    def leave_word(self, cause: str) -> None:
        """Say why, for those whose connection to this process is about to break."""
        with suppress(RuntimeError):
            self._store.compare_set(f"lost/{self.rank}", "", cause)

    def word_of(self, ranks: Sequence[int]) -> str:
        """Why the first of `ranks` that has left word of it has left; empty if none has."""
        with suppress(RuntimeError):
            for rank in ranks:
                if self._store.check([f"lost/{rank}"]):
                    return self._store.get(f"lost/{rank}").decode()
        return ""

    def close(self) -> None:
        """Leave. Connections break; may be called twice."""
        if self._links is not None:
            self._links.close()
        self._links = None


def _absent(members: Members, missing: Sequence[int], timeout_s: float) -> str:
    there = members.world_size - len(missing)
    return (
        f"{there} of {members.world_size} members are there, {members.names(missing)} did not come within "
        f"{timeout_s:g} s. Make a group without it, or look why its process hangs."
    )
