"""A process group of its own for a transfer, beside those of DeepSpeed and vLLM: meeting, connections, and their end.

The group is made of an address and a group rank: a store and a backend object of torch.distributed, without its global
state. So a process can have several, and can leave one and join the next: when an engine joins or leaves, or is lost,
everyone closes and joins a group of the next generation, of other members, at the same store. The store's server is not
a member (`serve_store`): it outlives groups.

gloo has three habits that this file is built around (torch 2.13, tests/integration/test_weight_group.py):
- When a peer dies in the middle of a message, the wait for that message goes on to its time-out; only what is posted
  behind it fails at once. So every message has a tail of one byte behind it, and the tail is waited for first.
- Neither `shutdown` nor `abort` closes connections; dropping the last reference to the backend and its works does.
- A wait that runs into its time-out breaks the connections to other peers too. So after any error a group is over.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.dataflow.errors import WeightSyncError, boundary
from penstock.weights.transport.process_group.members import Members

_SHORTEST_WAIT = timedelta(milliseconds=1)
"""A time-out of zero means none to torch."""


class LostPeerError(RuntimeError):
    """A message could not begin, or did not get through in time.

    Attributes:
        peers: Group ranks that it was to come from or to go to; several where the backend does not tell (NCCL).
        num_bytes: Its size, or their size.
        is_late: The time-out has passed; otherwise the connection is broken.
    """

    def __init__(self, peers: tuple[int, ...], num_bytes: int, what: str, *, is_late: bool = False) -> None:
        self.peers = peers
        self.num_bytes = num_bytes
        self.is_late = is_late
        super().__init__(what)


class Pending(NamedTuple):
    """A message under way: `peers` and `num_bytes` as in `LostPeerError`, `works` of torch in the order of waiting."""

    peers: tuple[int, ...]
    num_bytes: int
    works: tuple[Any, ...]

    def finish(self, deadline: float) -> None:
        """Wait until it is complete, or until `deadline` of `time.monotonic`.

        Raises:
            LostPeerError: If it is not complete then, or the connection breaks.
        """
        try:
            for work in self.works:
                work.wait(max(timedelta(seconds=deadline - time.monotonic()), _SHORTEST_WAIT))
        except RuntimeError as error:
            is_late = time.monotonic() >= deadline
            raise LostPeerError(self.peers, self.num_bytes, str(error), is_late=is_late) from error


class Exchange(NamedTuple):
    """Messages that have begun: what to wait for before reading, and what before writing over what was sent."""

    receiving: list[Pending]
    sending: list[Pending]


Part = tuple[int, torch.Tensor]
"""Peer and contiguous tensor."""


class GlooLinks:
    """Messages between CPUs."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta, address: str) -> None:
        """Connect to everyone; `address` is this machine's, as the others reach it."""
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to name a device
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        self._backend: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._tail = torch.zeros(1, dtype=torch.uint8)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Exchange:
        """Begin to send and receive.

        Raises:
            LostPeerError: If a connection is broken already.
        """
        receiving = [self._begin(self._backend.recv, part) for part in receives]
        return Exchange(receiving, [self._begin(self._backend.send, part) for part in sends])

    def close(self) -> None:
        """Break all connections."""
        self._backend = None

    def _begin(self, operation: Callable[[list[torch.Tensor], int, int], Any], part: Part) -> Pending:
        peer, tensor = part
        try:
            body = operation([tensor], peer, 0)
            tail = operation([self._tail], peer, 0)
        except RuntimeError as error:
            raise LostPeerError((peer,), tensor.nbytes, str(error)) from error
        return Pending((peer,), tensor.nbytes, (tail, body))


class NcclLinks:
    """Messages between GPUs. One NCCL group per exchange, so the order of its messages cannot matter."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device) -> None:
        """Make the communicator, with everyone."""
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - its only name in Python
        with _blocking_waits():
            self._backend: Any = ProcessGroupNCCL(store, rank, world_size, options)
        self._backend.eager_connect_single_device(device)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Exchange:
        """Begin to send and receive; all of it is pending together."""
        parts = [*receives, *sends]
        if not parts:
            return Exchange([], [])
        self._backend._start_coalescing()  # noqa: SLF001 - ncclGroupStart
        for peer, tensor in receives:
            self._backend.recv([tensor], peer, 0)
        for peer, tensor in sends:
            self._backend.send([tensor], peer, 0)
        work = self._backend._end_coalescing()  # noqa: SLF001 - ncclGroupEnd
        peers = tuple(sorted({peer for peer, _ in parts}))
        return Exchange([Pending(peers, sum(tensor.nbytes for _, tensor in parts), (work,))], [])

    def close(self) -> None:
        """Break all connections, and end kernels that wait for a peer."""
        if self._backend is not None:
            self._backend.abort()
        self._backend = None


Links = GlooLinks | NcclLinks


def serve_store(host: str, port: int = 0, timeout_s: float = 60.0) -> TCPStore:
    """The server of the store that processes meet at; it lives as long as the object. Port 0 takes a free one."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store.

    Raises:
        WeightSyncError: If there is none.
    """
    with boundary(WeightSyncError, f"weights: no store for the transfer group answers at {host}:{port}"):
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def connect(
    store: Store, rank: int, world_size: int, timeout_s: float, device: torch.device, store_at: tuple[str, int]
) -> Links:
    """Connect a process to all others, over gloo from CPU memory and over NCCL from GPU memory."""
    timeout = timedelta(seconds=timeout_s)
    links = PrefixStore("links", store)
    if device.type == "cuda":
        return NcclLinks(links, rank, world_size, timeout, device)
    return GlooLinks(links, rank, world_size, timeout, _address_towards(*store_at))


def meet(
    store: Store, key: str, rank: int, world_size: int, value: str, timeout_s: float
) -> tuple[list[int], list[str]]:
    """Wait for everyone.

    Returns:
        Group ranks that did not come in time, and, if that is none, the value that each has brought.
    """
    keys = [f"{key}/{member}" for member in range(world_size)]
    store.set(keys[rank], value)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except DistStoreError:
        return [member for member, its_key in enumerate(keys) if not store.check([its_key])], []
    return [], [brought.decode() for brought in store.multi_get(keys)]


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host: gloo would take what the machine's own name resolves to."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """NCCL groups that are made inside wait on the host, with time-outs, and raise.

    Otherwise `wait` only orders streams, and torch's watchdog ends the whole process when a peer is lost.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_LOST = "lost: "


class TransferGroup:
    """One process's membership.

    Invariant: every member carries out the same transfers in the same order; what each is about to do is compared
    before the first bucket.
    """

    def __init__(
        self,
        store_at: tuple[str, int],
        members: Members,
        rank: int,
        *,
        timeout_s: float,
        generation: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        """Meet all members and connect to them.

        Args:
            store_at: Host and port of the store's server (`serve_store`).
            members: Everyone.
            rank: This process's group rank.
            timeout_s: Longest wait for everyone, and then for each message, seconds.
            generation: A number that no earlier group at this store has.
            device: Where messages are packed: `cpu` is gloo, `cuda:<index>` is NCCL.

        Raises:
            WeightSyncError: If a participant does not join in time, who is named.
        """
        self.members = members
        self.rank = rank
        self.timeout_s = timeout_s
        self.device = torch.device(device)
        self._num_meetings = 0
        self._store = PrefixStore(f"group{generation}", connect_store(*store_at, timeout_s))
        what = f"weights: {members.name(rank)} joins group {generation}"
        with boundary(WeightSyncError, what):
            missing, _ = meet(self._store, "join", rank, members.world_size, "", timeout_s)
            if missing:
                raise WeightSyncError(f"{what}: {_absent(members, missing, timeout_s)}")
            self._links: Links | None = connect(self._store, rank, members.world_size, timeout_s, self.device, store_at)

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
            WeightSyncError: If a participant does not join in time, or is about to do something else.
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
