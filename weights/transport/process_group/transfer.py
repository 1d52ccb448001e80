"""Weights between nodes: a plan carried out by the processes that hold the two sides, over a group of their own.

Consumes: a plan, a route and one side's tensors. Waits for: every member, before the first bucket; then, bucket by
bucket, the messages of its sources and the peers that take its own. Unblocked by: those, a broken connection, or the
time-out of the leg. An error names the peer, the version and what is pending, and ends the group on this process; that
breaks the connections to the others, which end with an error too. Whoever is left joins a group of the next
generation.

No deadlock: a process begins to receive and to send a bucket once it has received, passed on and sent the bucket
before, and waits only after it has begun all of it. So whoever is in the earliest bucket waits for nobody but the
processes before it on the bucket's way from the sources along the relay, and that way has no cycle.

Within a bucket, all copies from one source to one destination rank are one message: the boxes one after the other, in
the plan's order. What a destination rank receives in a bucket lies in one buffer, message after message by source rank,
and that buffer as it is goes on to the same rank of the next replicas. So a process needs the bytes of one bucket for
sending and of one for receiving, and training ranks only send and engine ranks only receive or pass on what they
received. Through a codec each message is bytes whose number only the sender knows, so a header goes before them.
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
from penstock.weights.layout.strided import strided_box
from penstock.weights.planner.plan import Copy, Plan
from penstock.weights.transport.process_group.group import Exchange, Links, LostPeerError, Part, Pending, TransferGroup
from penstock.weights.transport.process_group.members import Route
from penstock.weights.transport.streaming import HALF_WRITTEN

_WHAT_TO_DO = "What arrived is not used. Join a group of the next generation without it, and send the version again."
Finish = Callable[[Sequence[Pending]], None]
"""Waits for messages, with the time-out of a leg."""
Tensors = Mapping[str, torch.Tensor]
"""Buffer name -> flat tensor."""


class Message(NamedTuple):
    """Elements [start, stop) of a process's message buffer.

    Attributes:
        peer: Group rank that it goes to or comes from.
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
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    children: tuple[int, ...]

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
    assert not plan.resident, "what stays on a device is in no message"
    place = next(
        ((replica, ranks.index(group_rank)) for replica, ranks in enumerate(route.replicas) if group_rank in ranks),
        None,
    )
    return [_step(route, group_rank, place, bucket) for bucket in plan.buckets]


def _step(route: Route, me: int, place: tuple[int, int] | None, bucket: tuple[Copy, ...]) -> Step:
    outgoing: dict[int, list[Copy]] = defaultdict(list)
    for copy in bucket:
        if route.sources[copy.src_rank] == me:
            outgoing[route.replicas[0][copy.dst_rank]].append(copy)
    sends = tuple(_in_a_row(sorted(outgoing.items())))
    if place is None:
        return Step(sends, (), ())
    replica, rank = place
    incoming: dict[int, list[Copy]] = defaultdict(list)
    for copy in sorted((copy for copy in bucket if copy.dst_rank == rank), key=lambda copy: copy.src_rank):
        incoming[route.sources[copy.src_rank]].append(copy)
    arriving = list(incoming.items())
    if replica:
        parents = [hop.parent for hop in route.hops if hop.child == replica]
        arriving = [(route.replicas[parent][rank], copies) for parent in parents for _, copies in arriving]
    children = tuple(route.replicas[hop.child][rank] for hop in route.hops if hop.parent == replica)
    return Step(sends, tuple(_in_a_row(arriving)), children if arriving else ())


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


def _parts(message: Message, buffer: torch.Tensor) -> Iterator[tuple[Copy, torch.Tensor]]:
    start = message.start
    for copy in message.copies:
        yield copy, buffer[start : start + copy.num_elements].view(copy.shape)
        start += copy.num_elements


class Cargo(NamedTuple):
    """One version at one process.

    Attributes:
        source: What it holds on the plan's source side.
        destination: What it fills on the plan's destination side.
        held: The version before, as it was received.
        expected: What arrives is compared with this, bucket by bucket, if it goes where it is in use.
    """

    version: int
    source: Tensors
    destination: Tensors
    held: Tensors
    expected: ExpectedBuckets | None = None


@dataclass(slots=True)
class Traffic:
    """What one process has sent and received of one version.

    Attributes:
        sent_bytes: By the group rank that it went to.
        received_bytes: By the group rank that it came from.
        seconds: From when everyone was there.
        sums: What it adds to the checksums of what it sent; None: nobody asks.
        num_elements: Sent through a codec.
        num_changed: Of them, as far as the codec says; all others.
    """

    sent_bytes: Counter[int] = field(default_factory=Counter)
    received_bytes: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    sums: list[PartialSum] | None = None
    num_elements: int = 0
    num_changed: int = 0


class ExpectedBuckets:
    """What every bucket of a version must be, by the sums of those who send it."""

    def __init__(self, sums: Iterable[BucketSum]) -> None:
        self._sums: Counter[tuple[int, int, str]] = Counter()
        for bucket, rank, buffer, checksum in sums:
            self._sums[bucket, rank, buffer] += checksum

    def check(self, version: int, number: int, messages: Iterable[Message], incoming: torch.Tensor) -> None:
        """Compare a bucket.

        Args:
            version: For the message.
            number: Of the bucket.
            messages: That make it up.
            incoming: Where they lie.

        Raises:
            WeightSyncError: If a sum differs.
        """
        found: Counter[tuple[int, str]] = Counter()
        for message in messages:
            for part in sums_of(message, incoming):
                found[part.engine_rank, part.buffer] += part.checksum
        for (rank, buffer), checksum in found.items():
            sent = self._sums[number, rank, buffer] % 2**64
            if checksum % 2**64 != sent:
                raise WeightSyncError(
                    f"weights v{version}: bucket {number + 1}: what arrived of {buffer} for rank {rank} has sum "
                    f"{checksum % 2**64:x}, sent was {sent:x}. It was damaged on the way. {HALF_WRITTEN}"
                )


class Transfer:
    """One process's part of every version that takes one route by one plan. Made once, used for every version.

    Attributes:
        extra_bytes: Memory that it holds for messages; at most one bucket.
    """

    def __init__(
        self, group: TransferGroup, plan: Plan, route: Route, dtype: torch.dtype, codec: Codec | None = None
    ) -> None:
        """Take memory for messages.

        Args:
            group: This process's membership.
            plan: The same on all members, as are the next two; this is compared before each version.
            route: Where the plan's ranks are.
            dtype: Of the wire.
            codec: What messages go through; None: as they are.
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
        """Carry out this process's part of one version.

        Args:
            version: Policy version, for messages and to find members that disagree.
            source: What this process holds on the plan's source side; empty if it is not on it.
            destination: What this process fills on the plan's destination side, of any dtype; empty if it is not on
                it. Padding is left as it is. On a GPU it is complete in the order of the current stream.
            held: With a codec: the version before, as it was received; may be `destination`, which is the default.
            wants_sums: Add up what this process sends for the checksums of the destination's buffers.
            expected: Compare every bucket with this before any of it is put into `destination` or passed on. Not with
                a codec.

        Returns:
            Bytes by peer, and those sums.

        Raises:
            WeightSyncError: If a peer does not come, is lost or is too late. Then the group is closed, and what
                arrived must not be used.
        """
        what = f"weights v{version}"
        cargo = Cargo(version, source, destination, destination if held is None else held, expected)
        name = self._group.members.name(self._group.rank)
        try:
            with boundary(WeightSyncError, f"{what}: {name}"):
                links = self._group.links
                self._group.meet(what, self._fingerprint)
                started = time.monotonic()
                traffic = Traffic(sums=[] if wants_sums else None)
                for number, step in enumerate(self._steps):
                    begun = time.monotonic()
                    try:
                        if self._coded is None:
                            self._bucket(links, number, step, cargo, traffic)
                        else:
                            self._coded.carry(links, number, step, cargo, (self._outgoing, self._incoming), traffic)
                    except LostPeerError as lost:
                        where = f"{what}: {name}, bucket {number + 1} of {len(self._steps)}"
                        raise WeightSyncError(self._what_is_lost(where, lost, begun, traffic)) from lost
                traffic.seconds = time.monotonic() - started
                return traffic
        except WeightSyncError as error:
            self._group.leave_word(str(error))
            self._group.close()
            _forget_frames(error)
            raise

    @torch.no_grad()
    def bucket_sums(self, source: Tensors) -> Iterator[BucketSum]:
        """What this process is about to send adds to the checksums, bucket by bucket, read where it comes from."""
        for number, step in enumerate(self._steps):
            for message in step.sends:
                pack(message, source, self._outgoing)
                yield from (BucketSum(number, *part) for part in sums_of(message, self._outgoing))

    @property
    def num_sent_bytes(self) -> int:
        """What this process sends of its own of every version, without a codec."""
        return sum(step.num_sent for step in self._steps) * self._outgoing.itemsize

    def close(self) -> None:
        """Leave the group; may be called twice."""
        self._group.close()

    def _bucket(self, links: Links, number: int, step: Step, cargo: Cargo, traffic: Traffic) -> None:
        for message in step.sends:
            pack(message, cargo.source, self._outgoing)
        sends = [(peer, self._outgoing[start:stop]) for peer, start, stop in by_peer(step.sends)]
        receives = [(peer, self._incoming[start:stop]) for peer, start, stop in by_peer(step.receives)]
        exchange = links.exchange(sends, receives)
        if traffic.sums is not None:
            for message in step.sends:
                traffic.sums.extend(sums_of(message, self._outgoing))
        self._finish(exchange.receiving)
        for peer, tensor in receives:
            traffic.received_bytes[peer] += tensor.nbytes
        if cargo.expected is not None:
            cargo.expected.check(cargo.version, number, step.receives, self._incoming)
        relays = [(child, self._incoming[: step.num_received]) for child in step.children]
        relay = links.exchange(relays, []) if relays else Exchange([], [])
        for message in step.receives:
            unpack(message, self._incoming, cargo.destination)
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
        word = self._group.word_of(lost.peers)
        why = f"It has left word: {word}" if word else f"{_first_sentence(str(lost))}. {_WHAT_TO_DO}"
        return (
            f"{where}: {members.names(lost.peers)} {kind} after {elapsed:.1f} s (time-out {self._group.timeout_s:g} s) "
            f"with {lost.num_bytes:,} bytes of this bucket{pending} pending. {why}"
        )


class CodedBuckets:
    """Buckets through a codec: what one process keeps of the messages of a route from version to version.

    Both sides keep what the codec needs by message: the sender a copy of what it sent last (`SenderState`), the
    receiver nothing but the version, since the values are in the buffers of the version before. Relays hand on what
    they received as it is. A process begins to send headers and payloads together, so nobody waits for an answer.

    Extra memory: a bucket each for what is sent and what is received, in bytes, beside those of `Transfer`.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype, finish: Finish) -> None:
        self._codec = codec
        self._dtype = dtype
        self._finish = finish
        self._sent: dict[tuple[int, int], SenderState] = {}
        self._received: dict[tuple[int, int], ReceiverState] = {}

    def carry(
        self,
        links: Links,
        number: int,
        step: Step,
        cargo: Cargo,
        buffers: tuple[torch.Tensor, torch.Tensor],
        traffic: Traffic,
    ) -> None:
        """Carry out one bucket.

        Args:
            links: Connections.
            number: Of the bucket.
            step: This process's part of it.
            cargo: The version.
            buffers: For the elements that go out and that come in.
            traffic: Bytes and checksums are added to it.

        Raises:
            LostPeerError: If a message does not get through.
            WeightSyncError: If what arrived cannot be decoded.
        """
        outgoing, incoming = buffers
        sends = self._encoded(number, step, cargo, outgoing, traffic)
        # NCCL takes messages from and into GPU memory only, headers too; what they say is read on the CPU.
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
            self._decode((number, position), message, header, payload, cargo.held, incoming)
            unpack(message, incoming, cargo.destination)
        self._finish([*exchange.sending, *relay.receiving, *relay.sending])
        for peer, tensor in [*sends, *relays]:
            traffic.sent_bytes[peer] += tensor.nbytes
        for arrived in (headers, payloads):
            for peer, tensor in arrived.items():
                traffic.received_bytes[peer] += tensor.nbytes

    def _encoded(self, number: int, step: Step, cargo: Cargo, outgoing: torch.Tensor, traffic: Traffic) -> list[Part]:
        """Header and payload for each peer."""
        parts: list[Part] = []
        for message in step.sends:
            pack(message, cargo.source, outgoing)
            values = outgoing[message.start : message.stop]
            place = (number, message.peer)
            state = self._sent.setdefault(place, SenderState(f"bucket {number + 1}"))
            encoded = self._codec.encode(values, state, cargo.version)
            header, payload = to_wire(encoded)
            if traffic.sums is not None:
                if state.values is not None:  # what receivers will hold; the payload is a copy already
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
    """What a backend says, without the place in its sources and its advice."""
    words = text.strip().splitlines()[0] if text.strip() else "no detail"
    return (words.rpartition(".cc:")[2].partition("] ")[2] or words).partition(". ")[0].rstrip(".")


def _forget_frames(error: BaseException) -> None:
    """Forget what the frames of an error refer to: gloo's connections live as long as a work of theirs."""
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
