"""Weights between nodes: a plan carried out by the processes that hold the two sides, over a group of their own.

Consumes: a plan, a route and one side's tensors. Waits for: every member, before the first bucket; then, bucket by
bucket, the messages of its sources and the peers that take its own. Unblocked by: those, a broken connection, or the
time-out of the leg. An error names the peer, the version and what is pending, and ends the group on this process; that
breaks the connections to the others, which end with an error too. Whoever is left joins a group of the next
generation.

No deadlock: a process begins to receive and to send a bucket once it has received, passed on and sent the bucket
before, and waits only after it has begun all of it. So whoever is in the earliest bucket waits for nobody but the
processes before it on the bucket's way from the sources along the relay, and that way has no cycle.
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from penstock.dataflow.errors import WeightSyncError, boundary
from penstock.dataflow.ports import BucketSum
from penstock.weights.codec.codec import Codec
from penstock.weights.planner.plan import Plan
from penstock.weights.streaming import ExpectedBuckets
from penstock.weights.transport.coded import CodedBuckets
from penstock.weights.transport.group import TransferGroup
from penstock.weights.transport.links import Exchange, Links, LostPeerError, Pending
from penstock.weights.transport.members import Route
from penstock.weights.transport.messages import Step, by_peer, copy_directly, pack, steps_of, sums_of, unpack
from penstock.weights.transport.traffic import Cargo, Tensors, Traffic

_WHAT_TO_DO = "What arrived is not used. Join a group of the next generation without it, and send the version again."


class Transfer:
    """One process's part of every version that takes one route by one plan. Made once, used for every version.

    Attributes:
        extra_bytes: Memory that it holds for messages; at most one bucket, and one more where one process is on both
            sides.
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
            codec: What messages go through; None: as they are. Not for a process that is on both sides.
        """
        assert dtype.itemsize == plan.item_bytes, f"{dtype} on the wire, {plan.item_bytes} bytes in the plan"
        self._group = group
        self._steps = steps_of(plan, route, group.rank)
        self._fingerprint = f"plan {zlib.crc32(f'{plan.to_json()} {route} {dtype} {codec}'.encode()):08x}"
        self._coded = None if codec is None else CodedBuckets(codec, dtype, self._finish)
        self._outgoing = _buffer(max((step.num_sent for step in self._steps), default=0), dtype, group.device)
        self._incoming = _buffer(max((step.num_received for step in self._steps), default=0), dtype, group.device)
        self.extra_bytes = self._outgoing.nbytes + self._incoming.nbytes
        for buffer in (self._outgoing, self._incoming):
            assert buffer.nbytes <= max(plan.bucket_bytes, plan.item_bytes), "more than a bucket of extra memory"
        self._expected = Counter[int]()
        for step in self._steps:
            for peer, num_elements in _legs(step, group.rank):
                self._expected[peer] += num_elements * plan.item_bytes

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
        what, cargo = (
            f"weights v{version}",
            Cargo(version, source, destination, destination if held is None else held, expected),
        )
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
        me, source, destination = self._group.rank, cargo.source, cargo.destination
        for message in step.sends:
            pack(message, source, self._outgoing)
        sends = [(peer, self._outgoing[start:stop]) for peer, start, stop in by_peer(step.sends)]
        receives = [(peer, self._incoming[start:stop]) for peer, start, stop in by_peer(step.receives) if peer != me]
        exchange = links.exchange(sends, receives)
        for message in step.receives:
            if message.peer == me:
                pack(message, source, self._incoming)
        for copy in step.direct:
            copy_directly(copy, source, destination)
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
            unpack(message, self._incoming, destination)
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


def _buffer(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(num_elements, dtype=dtype, device=device)


def staging_buffers(
    sizes: Mapping[str, int], dtype: torch.dtype, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """What a version arrives in: one flat tensor per buffer of a rank's layout, padding zero as in the engines."""
    return {name: torch.zeros(size, dtype=dtype, device=device) for name, size in sizes.items()}


def _legs(step: Step, me: int) -> list[tuple[int, int]]:
    """Peer and elements of everything that a process sends and receives in a bucket."""
    legs = [(message.peer, message.stop - message.start) for message in (*step.sends, *step.receives)]
    legs += [(child, step.num_received) for child in step.children]
    return [leg for leg in legs if leg[0] != me]


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
