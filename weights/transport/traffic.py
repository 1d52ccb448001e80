"""What a transfer moves: the tensors at its ends, and what was counted on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penstock.weights.checksum import PartialSum
from penstock.weights.streaming import ExpectedBuckets

Tensors = Mapping[str, torch.Tensor]
"""Buffer name -> flat tensor."""


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
