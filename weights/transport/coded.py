"""Buckets through a codec: each message as bytes whose number only the sender knows, so a header goes before them.

Both sides keep what the codec needs by message: the sender a copy of what it sent last (`SenderState`), the receiver
nothing but the version, since the values are in the buffers of the version before. Relays hand on what they received
as it is. Consumes, waits and is unblocked as in transfer.py: a process begins to send headers and payloads together, so
nobody waits for an answer.

Extra memory: a bucket each for what is sent and what is received, in bytes, beside those of transfer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch

from penstock.weights.codec.codec import Codec, ReceiverState, SenderState
from penstock.weights.codec.wire import HEADER_WORDS, from_wire, payload_bytes, to_wire
from penstock.weights.transport.links import Exchange, Links, Part, Pending
from penstock.weights.transport.messages import Message, Step, pack, repack, sums_of, unpack
from penstock.weights.transport.traffic import Cargo, Tensors, Traffic

Finish = Callable[[Sequence[Pending]], None]
"""Waits for messages, with the time-out of a leg."""


class CodedBuckets:
    """What one process keeps of the messages of a route from version to version."""

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
                received = outgoing if state.values is None else _placed(state.values, message, outgoing)
                traffic.sums.extend(sums_of(message, received))
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
        self._codec.decode(encoded, state, values, out=values)


def _placed(values: torch.Tensor, message: Message, outgoing: torch.Tensor) -> torch.Tensor:
    """What receivers will hold, where the message lies; it was sent already, as other bytes."""
    outgoing[message.start : message.stop] = values
    return outgoing


def _by_message(
    receives: Sequence[Message], headers: Mapping[int, torch.Tensor], payloads: Mapping[int, torch.Tensor]
) -> Iterator[tuple[Message, torch.Tensor, torch.Tensor]]:
    for peer, messages in groupby(receives, key=lambda message: message.peer):
        start = 0
        for message, header in zip(messages, headers[peer], strict=True):
            stop = start + payload_bytes(header)
            yield message, header, payloads[peer][start:stop]
            start = stop
