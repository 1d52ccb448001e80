"""Weights between nodes: a plan executed by the source and destination processes over a transfer group.

Consumes: a plan, a route and this process's tensors. Waits for: every member, before the first bucket; then, bucket by
bucket, the messages of its sources and the peers that receive its own. Unblocked by: those, a broken connection, or the
time-out of a message. An error names the peer, the version and the pending bytes, and closes the group in this process;
that breaks the connections to the others, which fail too. The remaining members join a group of the next generation.

No deadlock: a process starts to receive and send a bucket once it has received, relayed and sent the previous bucket,
and waits only after it has started all messages of the bucket. So a process in the earliest bucket waits only for the
processes before it on the bucket's route from the sources along the relay, and that route has no cycle.

Within a bucket, all copies from one source to one destination rank are one message: the boxes one after the other, in
the plan's order. The data that a destination rank receives in a bucket lies in one message buffer, ordered by source
rank, and that buffer is relayed unchanged to the same rank of the next replicas. So a process needs memory for one
bucket to send and one to receive; training ranks only send, and engine ranks only receive or relay. With a codec only
the sender knows the size of a message, so a header precedes it.
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch

from penstock.dataflow.errors import WeightSyncError, boundary
from penstock.dataflow.ports import BucketSum
from penstock.weights.checksum import PartialSum, strided_sum
from penstock.weights.codec.codec import Codec, ReceiverState, SenderState
from penstock.weights.codec.wire import HEADER_WORDS, from_wire, payload_bytes, to_wire
from penstock.weights.layout.algebra import strided_box
from penstock.weights.planner.plan import Plan, PlannedCopy
from penstock.weights.transport.in_place import PARTLY_WRITTEN
from penstock.weights.transport.process_group.group import Exchange, Links, LostPeerError, Part, Pending, TransferGroup
from penstock.weights.transport.process_group.members import Route

_WHAT_TO_DO = "Received data is not used. Join a group of the next generation without it, and send the version again."
Finish = Callable[[Sequence[Pending]], None]
"""Waits for messages, each until the group's time-out."""
Tensors = Mapping[str, torch.Tensor]
"""Buffer name -> flat tensor."""


class Message(NamedTuple):
    """Elements [start, stop) of a process's message buffer."""

    peer: int
    """Group rank of its receiver or sender."""
    start: int
    stop: int
    copies: tuple[PlannedCopy, ...]


class Step(NamedTuple):
    """One bucket of one process."""

    sends: tuple[Message, ...]
    """Messages in the outgoing buffer."""
    receives: tuple[Message, ...]
    """Messages in the incoming buffer."""
    children: tuple[int, ...]
    """Group ranks that the incoming buffer is relayed to."""

    @property
    def num_sent(self) -> int:
        """Elements in the outgoing buffer."""
        return self.sends[-1].stop if self.sends else 0

    @property
    def num_received(self) -> int:
        """Elements in the incoming buffer."""
        return self.receives[-1].stop if self.receives else 0


def steps_of(plan: Plan, route: Route, group_rank: int) -> list[Step]:
    """A process's messages of every bucket."""
    assert not plan.resident, "copies within a device are not sent"
    place = next(
        ((replica, ranks.index(group_rank)) for replica, ranks in enumerate(route.replicas) if group_rank in ranks),
        None,
    )
    return [_step(route, group_rank, place, bucket) for bucket in plan.buckets]


def _step(route: Route, me: int, place: tuple[int, int] | None, bucket: tuple[PlannedCopy, ...]) -> Step:
    outgoing: dict[int, list[PlannedCopy]] = defaultdict(list)
    for copy in bucket:
        if route.sources[copy.src_rank] == me:
            outgoing[route.replicas[0][copy.dst_rank]].append(copy)
    sends = tuple(_in_a_row(sorted(outgoing.items())))
    if place is None:
        return Step(sends, (), ())
    replica, rank = place
    incoming: dict[int, list[PlannedCopy]] = defaultdict(list)
    for copy in sorted((copy for copy in bucket if copy.dst_rank == rank), key=lambda copy: copy.src_rank):
        incoming[route.sources[copy.src_rank]].append(copy)
    received = list(incoming.items())
    if replica:
        parents = [hop.parent for hop in route.hops if hop.child == replica]
        received = [(route.replicas[parent][rank], copies) for parent in parents for _, copies in received]
    children = tuple(route.replicas[hop.child][rank] for hop in route.hops if hop.parent == replica)
    return Step(sends, tuple(_in_a_row(received)), children if received else ())


def _in_a_row(parts: Iterable[tuple[int, list[PlannedCopy]]]) -> Iterator[Message]:
    start = 0
    for peer, copies in parts:
        stop = start + sum(copy.num_elements for copy in copies)
        yield Message(peer, start, stop, tuple(copies))
        start = stop


def pack(message: Message, source: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy the boxes of a message one after the other into a message buffer, cast to the wire dtype."""
    for copy, part in _parts(message, buffer):
        part.copy_(strided_box(source[copy.source.buffer], copy.shape, copy.source))


def unpack(message: Message, buffer: torch.Tensor, destination: Mapping[str, torch.Tensor]) -> None:
    """Copy every box of a message to its address in the destination's layout."""
    for copy, part in _parts(message, buffer):
        strided_box(destination[copy.destination.buffer], copy.shape, copy.destination).copy_(part)


def repack(message: Message, destination: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Inverse of `unpack`."""
    for copy, part in _parts(message, buffer):
        part.copy_(strided_box(destination[copy.destination.buffer], copy.shape, copy.destination))


def sums_of(message: Message, buffer: torch.Tensor) -> Iterator[PartialSum]:
    """Contributions of a message's boxes to the checksums of the destination's buffers."""
    for copy, part in _parts(message, buffer):
        checksum = strided_sum(part, copy.destination.offset, copy.destination.strides)
        yield PartialSum(copy.dst_rank, copy.destination.buffer, checksum)


def by_peer(messages: Iterable[Message]) -> Iterator[tuple[int, int, int]]:
    """Peer, start and stop of all messages to or from one process, which are adjacent."""
    for peer, some in groupby(messages, key=lambda message: message.peer):
        part = list(some)
        yield peer, part[0].start, part[-1].stop


def _parts(message: Message, buffer: torch.Tensor) -> Iterator[tuple[PlannedCopy, torch.Tensor]]:
    start = message.start
    for copy in message.copies:
        yield copy, buffer[start : start + copy.num_elements].view(copy.shape)
        start += copy.num_elements


class VersionTensors(NamedTuple):
    """The tensors of one version in one process."""

    version: int
    source: Tensors
    """Tensors that it sends."""
    destination: Tensors
    """Tensors that it receives into."""
    held: Tensors
    """The previous version, as received."""
    expected: ExpectedBuckets | None = None
    """Checksums that received buckets are compared with, if `destination` is in use."""


@dataclass(slots=True)
class Traffic:
    """What one process has sent and received of one version."""

    sent_bytes: Counter[int] = field(default_factory=Counter)
    """By group rank of the receiver."""
    received_bytes: Counter[int] = field(default_factory=Counter)
    """By group rank of the sender."""
    sums: list[PartialSum] | None = None
    """Contributions of the sent data to the checksums; None if not wanted."""
    num_elements: int = 0
    """Sent through a codec."""
    num_changed: int = 0
    """Changed elements among them; all elements of messages where the codec does not count them."""


class ExpectedBuckets:
    """Expected checksums of every bucket of a version, from its senders."""

    def __init__(self, sums: Iterable[BucketSum]) -> None:
        self._sums: Counter[tuple[int, int, str]] = Counter()
        for bucket, rank, buffer, checksum in sums:
            self._sums[bucket, rank, buffer] += checksum

    def check(self, version: int, number: int, messages: Iterable[Message], incoming: torch.Tensor) -> None:
        """Compare a received bucket.

        Args:
            version: For the error message.
            number: Of the bucket.
            messages: Of the bucket.
            incoming: The message buffer that holds them.

        Raises:
            WeightSyncError: If a checksum differs.
        """
        found: Counter[tuple[int, str]] = Counter()
        for message in messages:
            for part in sums_of(message, incoming):
                found[part.engine_rank, part.buffer] += part.checksum
        for (rank, buffer), checksum in found.items():
            sent = self._sums[number, rank, buffer] % 2**64
            if checksum % 2**64 != sent:
                raise WeightSyncError(
                    f"weights v{version}: bucket {number + 1}: {buffer} for rank {rank} was received with checksum "
                    f"{checksum % 2**64:x}, but sent with {sent:x}. It was damaged in transfer. {PARTLY_WRITTEN}"
                )


class Transfer:
    """One process's part of the transfers of one plan over one route. Made once, used for every version.

    Attributes:
        extra_bytes: Memory for messages; at most one bucket each for sending and receiving.
    """

    def __init__(
        self, group: TransferGroup, plan: Plan, route: Route, dtype: torch.dtype, codec: Codec | None = None
    ) -> None:
        """Allocate memory for messages.

        Args:
            group: This process's membership.
            plan: Equal on all members, as are the next three; members compare them before each version.
            route: Group ranks of the plan's ranks.
            dtype: Of the wire.
            codec: That messages are encoded with; None: they are sent unencoded.
        """
        assert dtype.itemsize == plan.item_bytes, f"{dtype} on the wire, {plan.item_bytes} bytes in the plan"
        self._group = group
        self._steps = steps_of(plan, route, group.rank)
        self._fingerprint = f"plan {zlib.crc32(f'{plan} {route} {dtype} {codec}'.encode()):08x}"
        self._coded = None if codec is None else CodedBuckets(codec, dtype, self._finish)
        num_sent = max((step.num_sent for step in self._steps), default=0)
        num_received = max((step.num_received for step in self._steps), default=0)
        self._outgoing = torch.empty(num_sent, dtype=dtype, device=group.device)
        self._incoming = torch.empty(num_received, dtype=dtype, device=group.device)
        self.extra_bytes = self._outgoing.nbytes + self._incoming.nbytes
        for buffer in (self._outgoing, self._incoming):
            assert buffer.nbytes <= max(plan.bucket_bytes, plan.item_bytes), "more than a bucket of extra memory"
        self._expected = Counter[int]()
        for step in self._steps:
            for message in (*step.sends, *step.receives):
                self._expected[message.peer] += (message.stop - message.start) * plan.item_bytes
            for child in step.children:
                self._expected[child] += step.num_received * plan.item_bytes

    @torch.no_grad()
    def run(
        self,
        version: int,
        source: Tensors,
        destination: Tensors,
        *,
        held: Tensors | None = None,
        wants_sums: bool = False,
        expected: ExpectedBuckets | None = None,
    ) -> Traffic:
        """Run this process's part of the transfer of one version.

        Args:
            version: Policy version, for error messages and to find members that disagree.
            source: Tensors that this process sends; empty if it sends nothing.
            destination: Tensors that this process receives into, of any dtype; empty if it receives nothing. Padding is
                not changed. On a GPU they are complete in the order of the current stream.
            held: With a codec: the previous version, as received; may be `destination`, which is the default.
            wants_sums: Compute the contributions of the sent data to the checksums of the destination's buffers.
            expected: Compare every bucket with this before any of it is copied into `destination` or relayed. Not
                supported with a codec.

        Returns:
            Bytes by peer, and those contributions.

        Raises:
            WeightSyncError: If a peer is missing, lost or too late. Then the group is closed, and the received data
                must not be used.
        """
        what = f"weights v{version}"
        tensors = VersionTensors(version, source, destination, destination if held is None else held, expected)
        buffers = self._outgoing, self._incoming
        name = self._group.members.name(self._group.rank)
        try:
            with boundary(WeightSyncError, f"{what}: {name}"):
                links = self._group.links
                self._group.barrier(what, self._fingerprint)
                traffic = Traffic(sums=[] if wants_sums else None)
                for number, step in enumerate(self._steps):
                    begun = time.monotonic()
                    try:
                        if self._coded is None:
                            self._bucket(links, number, step, tensors, traffic)
                        else:
                            self._coded.transfer(links, number, step, tensors, buffers, traffic)
                    except LostPeerError as lost:
                        where = f"{what}: {name}, bucket {number + 1} of {len(self._steps)}"
                        raise WeightSyncError(self._what_is_lost(where, lost, begun, traffic)) from lost
                return traffic
        except WeightSyncError as error:
            self._group.report_failure(str(error))
            self._group.close()
            _forget_frames(error)
            raise

    @torch.no_grad()
    def bucket_sums(self, source: Tensors) -> Iterator[BucketSum]:
        """Contributions of this process's messages to the checksums, bucket by bucket, computed from its tensors."""
        for number, step in enumerate(self._steps):
            for message in step.sends:
                pack(message, source, self._outgoing)
                yield from (BucketSum(number, *part) for part in sums_of(message, self._outgoing))

    @property
    def num_sent_bytes(self) -> int:
        """Bytes that this process sends of every version, without a codec and without relaying."""
        return sum(step.num_sent for step in self._steps) * self._outgoing.itemsize

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._group.close()

    def _bucket(self, links: Links, number: int, step: Step, tensors: VersionTensors, traffic: Traffic) -> None:
        for message in step.sends:
            pack(message, tensors.source, self._outgoing)
        sends = [(peer, self._outgoing[start:stop]) for peer, start, stop in by_peer(step.sends)]
        receives = [(peer, self._incoming[start:stop]) for peer, start, stop in by_peer(step.receives)]
        exchange = links.exchange(sends, receives)
        if traffic.sums is not None:
            for message in step.sends:
                traffic.sums.extend(sums_of(message, self._outgoing))
        self._finish(exchange.receiving)
        for peer, tensor in receives:
            traffic.received_bytes[peer] += tensor.nbytes
        if tensors.expected is not None:
            tensors.expected.check(tensors.version, number, step.receives, self._incoming)
        relays = [(child, self._incoming[: step.num_received]) for child in step.children]
        relay = links.exchange(relays, []) if relays else Exchange([], [])
        for message in step.receives:
            unpack(message, self._incoming, tensors.destination)
        self._finish([*exchange.sending, *relay.receiving, *relay.sending])
        for peer, tensor in [*sends, *relays]:
            traffic.sent_bytes[peer] += tensor.nbytes

    def _finish(self, pending: Sequence[Pending]) -> None:
        deadline = time.monotonic() + self._group.timeout_s
        for message in pending:
            message.finish(deadline)

    def _what_is_lost(self, where: str, lost: LostPeerError, begun: float, traffic: Traffic) -> str:
        members, elapsed = self._group.members, time.monotonic() - begun
        left = sum(
            self._expected[peer] - traffic.sent_bytes[peer] - traffic.received_bytes[peer] for peer in lost.peers
        )
        pending = "" if self._coded is not None else f" and {left:,} of the version"
        kind = "is too late" if lost.is_late else "is lost"
        cause = self._group.failure_of(lost.peers)
        why = f"It has reported: {cause}" if cause else f"{_first_sentence(str(lost))}. {_WHAT_TO_DO}"
        return (
            f"{where}: {members.names(lost.peers)} {kind} after {elapsed:.1f} s (time-out {self._group.timeout_s:g} s) "
            f"with {lost.num_bytes:,} bytes of this bucket{pending} pending. {why}"
        )


class CodedBuckets:
    """Buckets sent through a codec: the codec states of one process's messages, kept from version to version.

    Sender and receiver keep the codec's state for each message: the sender a copy of the values it sent last
    (`SenderState`), the receiver only the version, since the values are in the buffers of the previous version. Relays
    forward messages unchanged. A process starts to send headers and payloads together, so no process waits for a reply.

    Extra memory: one encoded bucket each for sending and receiving, in addition to the buffers of `Transfer`.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype, finish: Finish) -> None:
        self._codec = codec
        self._dtype = dtype
        self._finish = finish
        self._sent: dict[tuple[int, int], SenderState] = {}
        self._received: dict[tuple[int, int], ReceiverState] = {}

    def transfer(
        self,
        links: Links,
        number: int,
        step: Step,
        tensors: VersionTensors,
        buffers: tuple[torch.Tensor, torch.Tensor],
        traffic: Traffic,
    ) -> None:
        """Transfer one bucket.

        Args:
            links: Connections.
            number: Of the bucket.
            step: This process's messages of it.
            tensors: Of the version.
            buffers: Message buffers for outgoing and incoming elements.
            traffic: Bytes and checksums are added to it.

        Raises:
            LostPeerError: If a message is not complete in time.
            WeightSyncError: If a received message cannot be decoded.
        """
        outgoing, incoming = buffers
        sends = self._encoded(number, step, tensors, outgoing, traffic)
        # NCCL sends only from GPU memory to GPU memory, headers too; they are read on the CPU.
        device = incoming.device
        headers = {
            peer: torch.empty((len(list(messages)), HEADER_WORDS), dtype=torch.int64, device=device)
            for peer, messages in groupby(step.receives, key=lambda message: message.peer)
        }
        exchange = links.exchange(sends, list(headers.items()))
        self._finish(exchange.receiving)
        read = {peer: header.cpu() for peer, header in headers.items()}
        payloads = {
            peer: torch.empty(sum(map(payload_bytes, header)), dtype=torch.uint8, device=device)
            for peer, header in read.items()
        }
        parts = [(peer, payload) for peer, payload in payloads.items() if payload.numel()]
        self._finish(links.exchange([], parts).receiving)
        relays = [
            (child, part)
            for child in step.children
            for part in (torch.cat(list(headers.values())), torch.cat(list(payloads.values())))
            if part.numel()
        ]
        relay = links.exchange(relays, []) if relays else Exchange([], [])
        for position, (message, header, payload) in enumerate(_by_message(step.receives, read, payloads)):
            self._decode((number, position), message, header, payload, tensors.held, incoming)
            unpack(message, incoming, tensors.destination)
        self._finish([*exchange.sending, *relay.receiving, *relay.sending])
        for peer, tensor in [*sends, *relays]:
            traffic.sent_bytes[peer] += tensor.nbytes
        for received in (headers, payloads):
            for peer, tensor in received.items():
                traffic.received_bytes[peer] += tensor.nbytes

    def _encoded(
        self, number: int, step: Step, tensors: VersionTensors, outgoing: torch.Tensor, traffic: Traffic
    ) -> list[Part]:
        """Header and payload for each peer."""
        parts: list[Part] = []
        for message in step.sends:
            pack(message, tensors.source, outgoing)
            values = outgoing[message.start : message.stop]
            place = (number, message.peer)
            state = self._sent.setdefault(place, SenderState(f"bucket {number + 1}"))
            encoded = self._codec.encode(values, state, tensors.version)
            header, payload = to_wire(encoded)
            if traffic.sums is not None:
                # The checksum is of the values that receivers will hold. The payload is a copy already.
                if state.values is not None:
                    values.copy_(state.values)
                traffic.sums.extend(sums_of(message, outgoing))
            traffic.num_changed += values.numel() if encoded.num_changed is None else encoded.num_changed
            traffic.num_elements += values.numel()
            parts += [(message.peer, part) for part in (header.view(1, -1), payload) if part.numel()]
        return parts

    def _decode(
        self,
        place: tuple[int, int],
        message: Message,
        header: torch.Tensor,
        payload: torch.Tensor,
        held: Tensors,
        incoming: torch.Tensor,
    ) -> None:
        values = incoming[message.start : message.stop]
        state = self._received.setdefault(place, ReceiverState(f"bucket {place[0] + 1}"))
        if state.version is not None:
            repack(message, held, incoming)
        encoded = from_wire(header, payload, state.buffer, self._dtype, values.numel())
        self._codec.decode(encoded, state, values)


def _first_sentence(text: str) -> str:
    """A backend's error message, without its source location and advice."""
    line = text.strip().splitlines()[0] if text.strip() else "no detail"
    return (line.rpartition(".cc:")[2].partition("] ")[2] or line).partition(". ")[0].rstrip(".")


def _forget_frames(error: BaseException) -> None:
    """Clear the frames of an error: they refer to gloo works, which would keep the connections open."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _by_message(
    receives: Sequence[Message], headers: Mapping[int, torch.Tensor], payloads: Mapping[int, torch.Tensor]
) -> Iterator[tuple[Message, torch.Tensor, torch.Tensor]]:
    for peer, messages in groupby(receives, key=lambda message: message.peer):
        start = 0
        for message, header in zip(messages, headers[peer], strict=True):
            stop = start + payload_bytes(header)
            yield message, header, payloads[peer][start:stop]
            start = stop
