"""A sender and a receiver in one process, and weights to send; shared by the tests of the codecs."""

from __future__ import annotations

import numpy as np
import torch

from penstock.weights.codec.codec import Encoded, ReceiverState, SenderState, words
from penstock.weights.codec.wire import CODECS, from_wire, payload_bytes, to_wire

DTYPES = [torch.float32, torch.bfloat16]
NUMPY_WORDS = {torch.float32: np.int32, torch.bfloat16: np.int16}


def from_bits(bits: list[int] | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    unsigned = np.asarray(bits, dtype=np.uint32 if dtype is torch.float32 else np.uint16)
    return torch.from_numpy(unsigned.view(NUMPY_WORDS[dtype]).copy()).view(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(words(left), words(right))


def travelled(encoded: Encoded, dtype: torch.dtype) -> Encoded:
    """The message as received: through bytes, at an odd address."""
    header, payload = to_wire(encoded)
    assert payload_bytes(header) == payload.numel() == encoded.num_bytes
    received = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]
    return from_wire(header, received, encoded.buffer, dtype, encoded.num_elements)


class Pair:
    """A sender and a receiver of one buffer."""

    def __init__(self, codec: str, first: torch.Tensor) -> None:
        self.codec = CODECS[codec]
        self.sender, self.receiver = SenderState("w"), ReceiverState("w")
        self.live = torch.full_like(first, 7.0)
        self.version = 0
        self.publish(first)

    def publish(self, current: torch.Tensor) -> Encoded:
        self.version += 1
        encoded = self.codec.encode(current, self.sender, self.version)
        received = travelled(encoded, current.dtype)
        self.codec.decode(received, self.receiver, self.live)
        assert self.sender.version == self.receiver.version == encoded.version == self.version
        if self.sender.values is not None:
            assert same_bits(self.sender.values, self.live), "the sender does not know what the receiver has"
        return encoded


def walk(dtype: torch.dtype, num_steps: int) -> list[torch.Tensor]:
    """Weights under updates like Adam's: many small ones, some elements a hundred times faster."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5000, generator=generator) * 0.05
    speeds = torch.where(torch.rand(5000, generator=generator) < 0.01, 1e-2, 1e-4)
    versions = [weights.to(dtype)]
    for _ in range(num_steps):
        weights = weights + speeds * torch.randn(5000, generator=generator)
        versions.append(weights.to(dtype))
    return versions
