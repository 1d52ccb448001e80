"""The members of a transfer group and the route of a transfer between them: pure, equal on every process.

Group ranks: the training ranks first, then the ranks of each engine replica in relay order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.weights.planner.relay import Hop


class Route(NamedTuple):
    """Group ranks of the ranks of a plan."""

    sources: tuple[int, ...]
    """Source rank of the plan -> group rank."""
    replicas: tuple[tuple[int, ...], ...]
    """By replica of the destination: destination rank of the plan -> group rank. The sources send to replica 0 only."""
    hops: tuple[Hop, ...] = ()
    """How the replicas relay it."""


@dataclass(frozen=True)
class Members:
    """All members of a group. When engines join or leave, a new group is formed."""

    num_training: int
    """Training ranks."""
    engines: tuple[str, ...]
    """Name of each replica."""
    tp_size: int = 1
    """Ranks of each replica."""

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.num_training + len(self.engines) * self.tp_size

    def engine(self, replica: int, rank: int) -> int:
        """Group rank of a replica's tensor-parallel rank."""
        return self.num_training + replica * self.tp_size + rank

    def name(self, group_rank: int) -> str:
        """A member's name in error messages."""
        if group_rank < self.num_training:
            return f"training rank {group_rank}"
        replica, rank = divmod(group_rank - self.num_training, self.tp_size)
        return f"{self.engines[replica]} rank {rank}"

    def names(self, group_ranks: Sequence[int]) -> str:
        """The names of several members."""
        return ", ".join(map(self.name, group_ranks))

    def to_engines(self, hops: tuple[Hop, ...]) -> Route:
        """Route from the training ranks to replica 0, and from there along `hops` (`relay_tree`) to all others.

        Replicas that no hop leads to receive nothing.
        """
        replicas = tuple(
            tuple(self.engine(replica, rank) for rank in range(self.tp_size)) for replica in range(len(self.engines))
        )
        return Route(tuple(range(self.num_training)), replicas, hops)
