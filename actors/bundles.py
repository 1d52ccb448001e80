"""Bundles of GPUs that a run reserves (devices.py). Importing this does not load Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bundle:
    """GPUs of one node that are reserved together."""

    num_gpus: int
    """How many."""
    accelerator_type: str | None = None
    """Ray's label that the node must have; None: any."""
    processes: tuple[Hashable, ...] = ()
    """Those whose GPUs they are; none if colocated roles use the bundle in turns."""


def described(bundles: Sequence[Bundle]) -> str:
    """`10 GPUs (2 x 4 H100 of one node, 2 x 1)`."""
    equal = Counter((one.num_gpus, one.accelerator_type) for one in bundles)
    parts = [
        f"{count} x {size}{f' {kind}' if kind else ''}{' of one node' if size > 1 else ''}"
        for (size, kind), count in equal.items()
    ]
    return f"{sum(one.num_gpus for one in bundles)} GPUs ({', '.join(parts)})"
