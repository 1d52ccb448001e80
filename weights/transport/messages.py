"""What each process sends and receives in each bucket of a plan: pure, the same on every process.

Within a bucket, all copies from one source to one destination rank are one message: the boxes one after the other, in
the plan's order. What a destination rank receives in a bucket lies in one buffer, message after message by source rank,
and that buffer as it is goes on to the same rank of the next replicas. So a process needs the bytes of one bucket for
sending and of one for receiving, and training ranks only send and engine ranks only receive or pass on what they
received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch

from penstock.weights.checksum import PartialSum, strided_sum
from penstock.weights.planner.plan import Copy, Plan
from penstock.weights.strided import strided_box
from penstock.weights.transport.members import Route


class Message(NamedTuple):
    """Elements [start, stop) of a process's message buffer.

    Attributes:
        peer: Group rank that it goes to or comes from; the process's own for what is local.
    """

    peer: int
    start: int
    stop: int
    copies: tuple[Copy, ...]


class Step(NamedTuple):
    """One bucket, for one process.

    Attributes:
        sends: Where in the outgoing buffer what is for whom.
        receives: Where in the incoming buffer what comes from whom.
        children: Group ranks that get the incoming buffer, as it is.
        direct: Local copies that no one else needs: from tensor to tensor.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    children: tuple[int, ...]
    direct: tuple[Copy, ...]

    @property
    def num_sent(self) -> int:
        """Elements in the outgoing buffer."""
        return self.sends[-1].stop if self.sends else 0

    @property
    def num_received(self) -> int:
        """Elements in the incoming buffer."""
        return self.receives[-1].stop if self.receives else 0


def steps_of(plan: Plan, route: Route, group_rank: int) -> list[Step]:
    """A process's part of every bucket."""
    places = [
        (replica, rank)
        for replica, ranks in enumerate(route.replicas)
        for rank, member in enumerate(ranks)
        if member == group_rank
    ]
    assert len(places) <= 1, f"group rank {group_rank} is {len(places)} destination ranks"
    return [_step(plan, route, group_rank, places[0] if places else None, bucket) for bucket in plan.buckets]


def _step(plan: Plan, route: Route, me: int, place: tuple[int, int] | None, bucket: tuple[Copy, ...]) -> Step:
    outgoing: dict[int, list[Copy]] = defaultdict(list)
    for copy in bucket:
        to = route.replicas[0][copy.dst_rank]
        assert (route.sources[copy.src_rank] == to) == plan.is_local(copy), f"{copy}: local in the plan or in the route"
        if route.sources[copy.src_rank] == me != to:
            outgoing[to].append(copy)
    sends = tuple(_in_a_row(sorted(outgoing.items())))
    if place is None:
        return Step(sends, (), (), ())
    replica, rank = place
    mine: dict[int, list[Copy]] = defaultdict(list)
    for copy in sorted((copy for copy in bucket if copy.dst_rank == rank), key=lambda copy: copy.src_rank):
        mine[route.sources[copy.src_rank]].append(copy)
    children = tuple(route.replicas[hop.child][rank] for hop in route.hops if hop.parent == replica)
    if replica:
        parents = [hop.parent for hop in route.hops if hop.child == replica]
        inherited = [(route.replicas[parent][rank], copies) for parent in parents for copies in mine.values()]
        return Step(sends, tuple(_in_a_row(inherited)), children if inherited else (), ())
    direct = () if children else tuple(mine.pop(me, ()))
    return Step(sends, tuple(_in_a_row(mine.items())), children if mine else (), direct)


def _in_a_row(parts: Iterable[tuple[int, list[Copy]]]) -> Iterator[Message]:
    start = 0
    for peer, copies in parts:
        stop = start + sum(copy.num_elements for copy in copies)
        yield Message(peer, start, stop, tuple(copies))
        start = stop


def pack(message: Message, source: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Put the boxes of a message one after the other, cast to the wire dtype."""
    for copy, part in _parts(message, buffer):
        part.copy_(strided_box(source[copy.source.buffer], copy.shape, copy.source))


def unpack(message: Message, buffer: torch.Tensor, destination: Mapping[str, torch.Tensor]) -> None:
    """Put every box of a message where the destination's layout has it."""
    for copy, part in _parts(message, buffer):
        strided_box(destination[copy.destination.buffer], copy.shape, copy.destination).copy_(part)


def repack(message: Message, destination: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Inverse of `unpack`."""
    for copy, part in _parts(message, buffer):
        part.copy_(strided_box(destination[copy.destination.buffer], copy.shape, copy.destination))


def sums_of(message: Message, buffer: torch.Tensor) -> Iterator[PartialSum]:
    """What the boxes of a message add to the checksums of the destination's buffers."""
    for copy, part in _parts(message, buffer):
        checksum = strided_sum(part, copy.destination.offset, copy.destination.strides)
        yield PartialSum(copy.dst_rank, copy.destination.buffer, checksum)


def by_peer(messages: Iterable[Message]) -> Iterator[tuple[int, int, int]]:
    """Peer, start and stop of what goes to or comes from one process: its messages lie one behind the other."""
    for peer, some in groupby(messages, key=lambda message: message.peer):
        part = list(some)
        yield peer, part[0].start, part[-1].stop


def copy_directly(copy: Copy, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]) -> None:
    """A local copy, without a message."""
    box = strided_box(source[copy.source.buffer], copy.shape, copy.source)
    strided_box(destination[copy.destination.buffer], copy.shape, copy.destination).copy_(box)


def _parts(message: Message, buffer: torch.Tensor) -> Iterator[tuple[Copy, torch.Tensor]]:
    start = message.start
    for copy in message.copies:
        yield copy, buffer[start : start + copy.num_elements].view(copy.shape)
        start += copy.num_elements
