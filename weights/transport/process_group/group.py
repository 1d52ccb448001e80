"""A separate process group for weight transfers, next to those of DeepSpeed and vLLM: rendezvous and connections.

A group is created from an address and a group rank: a store and a backend object of torch.distributed, without its
global state. So a process can be in several, and can leave one and join the next: when an engine joins or leaves, or is
lost, all members close the group and join one of the next generation, with other members, at the same store. The
store's server is not a member (`serve_store`): it outlives groups.

This file works around three properties of gloo (torch 2.13, tests/integration/test_weight_group.py):
- When a peer dies in the middle of a message, the wait for that message lasts until its time-out; only messages posted
  after it fail at once. So every message is followed by a tail of one byte, and the tail is waited for first.
- Neither `shutdown` nor `abort` closes connections; dropping the last reference to the backend and its works does.
- A wait that times out breaks the connections to other peers too. So a group cannot be used after any error.
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
"""To torch a time-out of zero means no time-out."""


class LostPeerError(RuntimeError):
    """A message could not be started, or was not complete in time.

    Attributes:
        peers: Group ranks of its senders or receivers; several if the backend does not tell which failed (NCCL).
        num_bytes: Size of the message or messages.
        is_late: The time-out has passed; otherwise the connection is broken.
    """

    def __init__(self, peers: tuple[int, ...], num_bytes: int, what: str, *, is_late: bool = False) -> None:
        self.peers = peers
        self.num_bytes = num_bytes
        self.is_late = is_late
        super().__init__(what)


class Pending(NamedTuple):
    """A pending message: `peers` and `num_bytes` as in `LostPeerError`, torch's `works` in the order of waiting."""

    peers: tuple[int, ...]
    num_bytes: int
    works: tuple[Any, ...]

    def finish(self, deadline: float) -> None:
        """Wait until it is complete, or until `deadline` of `time.monotonic`.

        Raises:
            LostPeerError: If it is not complete by then, or the connection breaks.
        """
        try:
            for work in self.works:
                work.wait(max(timedelta(seconds=deadline - time.monotonic()), _SHORTEST_WAIT))
        except RuntimeError as error:
            is_late = time.monotonic() >= deadline
            raise LostPeerError(self.peers, self.num_bytes, str(error), is_late=is_late) from error


class Exchange(NamedTuple):
    """Started messages: `receiving` is waited for before reading, `sending` before overwriting the sent data."""

    receiving: list[Pending]
    sending: list[Pending]


Part = tuple[int, torch.Tensor]
"""Peer and contiguous tensor."""


def gloo_devices(address: str) -> list[Any]:
    """The network interfaces of `GLOO_SOCKET_IFNAME`, as torch's default group uses them, else that of `address`."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [ProcessGroupGloo.create_device(interface=name.strip()) for name in named.split(",")]
    return [ProcessGroupGloo.create_device(hostname=address)]


class GlooLinks:
    """Messages between CPUs."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta, address: str) -> None:
        """Connect to all members; `address` is this machine's, as the others reach it."""
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to name a device
        options._devices = gloo_devices(address)  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        self._backend: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._tail = torch.zeros(1, dtype=torch.uint8)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Exchange:
        """Start to send and receive.

        Raises:
            LostPeerError: If a connection is broken already.
        """
        receiving = [self._start(self._backend.recv, part) for part in receives]
        return Exchange(receiving, [self._start(self._backend.send, part) for part in sends])

    def close(self) -> None:
        """Break all connections."""
        self._backend = None

    def _start(self, operation: Callable[[list[torch.Tensor], int, int], Any], part: Part) -> Pending:
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
        """Create the communicator with all members."""
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - its only name in Python
        with _blocking_waits():
            self._backend: Any = ProcessGroupNCCL(store, rank, world_size, options)
        self._backend.eager_connect_single_device(device)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Exchange:
        """Start to send and receive, as one pending group of messages."""
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
        """Break all connections, and abort kernels that wait for a peer."""
        if self._backend is not None:
            self._backend.abort()
        self._backend = None


Links = GlooLinks | NcclLinks


def serve_store(host: str) -> TCPStore:
    """The store's server, on a free port, where processes rendezvous; it lives as long as the object."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store.

    Raises:
        WeightSyncError: If no server answers.
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


def store_barrier(
    store: Store, key: str, rank: int, world_size: int, value: str, timeout_s: float
) -> tuple[list[int], list[str]]:
    """Wait until all members have set their value.

    Returns:
        Group ranks that are missing after the time-out, and, if none is, the value of each member.
    """
    keys = [f"{key}/{member}" for member in range(world_size)]
    store.set(keys[rank], value)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except DistStoreError:
        return [member for member, its_key in enumerate(keys) if not store.check([its_key])], []
    return [], [member_value.decode() for member_value in store.multi_get(keys)]


def _address_towards(host: str, port: int) -> str:
    """This machine's address in the direction of a host; gloo would use what the machine's own name resolves to."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """Make NCCL groups created in this context wait on the host, with time-outs, and raise.

    Otherwise `wait` only orders streams, and torch's watchdog ends the whole process when a peer is lost.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    previous = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


_LOST = "lost: "


class TransferGroup:
    """One process's membership in a group.

    Invariant: every member runs the same transfers in the same order; members compare version and plan before the first
    bucket.
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
        """Wait for all members and connect to them.

        Args:
            store_at: Host and port of the store's server (`serve_store`).
            members: Of the group.
            rank: This process's group rank.
            timeout_s: Longest wait for all members, and then for each message, seconds.
            generation: A number that no earlier group at this store has.
            device: Where messages are packed: `cpu` uses gloo, `cuda:<index>` NCCL.

        Raises:
            WeightSyncError: If a member does not join in time; it is named.
        """
        self.members = members
        self.rank = rank
        self.timeout_s = timeout_s
        self.device = torch.device(device)
        self._num_barriers = 0
        self._store = PrefixStore(f"group{generation}", connect_store(*store_at, timeout_s))
        what = f"weights: {members.name(rank)} joins group {generation}"
        with boundary(WeightSyncError, what):
            missing, _ = store_barrier(self._store, "join", rank, members.world_size, "", timeout_s)
            if missing:
                raise WeightSyncError(f"{what}: {_absent(members, missing, timeout_s)}")
            self._links: Links | None = connect(self._store, rank, members.world_size, timeout_s, self.device, store_at)

    @property
    def links(self) -> Links:
        """Connections to the others.

        Raises:
            WeightSyncError: If the group is closed.
        """
        if self._links is None:
            raise WeightSyncError(
                f"weights: {self.members.name(self.rank)} has closed its group. Join one of the next generation."
            )
        return self._links

    def barrier(self, what: str, plan: str) -> None:
        """Wait until every member is ready for the same transfer.

        Raises:
            WeightSyncError: If a member is not ready in time, or is about to run another transfer.
        """
        own = f"{what} {plan}"
        key = f"ready{self._num_barriers}"
        missing, values = store_barrier(self._store, key, self.rank, self.members.world_size, own, self.timeout_s)
        if missing:
            raise WeightSyncError(f"{what}: {_absent(self.members, missing, self.timeout_s)}")
        for rank, other in enumerate(values):
            if other.startswith(_LOST):
                raise WeightSyncError(f"{what}: {self.members.name(rank)} is lost. {other.removeprefix(_LOST)}")
            if other != own:
                raise WeightSyncError(
                    f"{what}: {self.members.name(rank)} is about to transfer {other}, {self.members.name(self.rank)} "
                    f"{own}. All members must run the same transfers in the same order."
                )
        if self._num_barriers:  # all members have read the previous keys
            self._store.delete_key(f"ready{self._num_barriers - 1}/{self.rank}")
        self._num_barriers += 1

    @staticmethod
    def interrupt(store: Store, generation: int, num_barriers: int, members: Members, cause: str) -> None:
        """End the wait at a barrier for members that will not reach it; called by the process that serves the store.

        Args:
            store: The store's server.
            generation: Of the group.
            num_barriers: Barriers before this one.
            members: Of the group.
            cause: Why they will not reach it.
        """
        store = PrefixStore(f"group{generation}", store)
        for rank in range(members.world_size):
            store.compare_set(f"ready{num_barriers}/{rank}", "", f"{_LOST}{cause}")

    def report_failure(self, cause: str) -> None:
        """Record in the store why this process leaves, for members whose connection to it is about to break."""
        with suppress(RuntimeError):
            self._store.compare_set(f"lost/{self.rank}", "", cause)

    def failure_of(self, ranks: Sequence[int]) -> str:
        """The cause that the first of `ranks` has reported; empty if none has."""
        with suppress(RuntimeError):
            for rank in ranks:
                if self._store.check([f"lost/{rank}"]):
                    return self._store.get(f"lost/{rank}").decode()
        return ""

    def close(self) -> None:
        """Leave the group; its connections break. Idempotent."""
        if self._links is not None:
            self._links.close()
        self._links = None


def _absent(members: Members, missing: Sequence[int], timeout_s: float) -> str:
    num_present = members.world_size - len(missing)
    return (
        f"{num_present} of {members.world_size} members are present, {members.names(missing)} did not join within "
        f"{timeout_s:g} s. Form a group without it, or find out why its process hangs."
    )
