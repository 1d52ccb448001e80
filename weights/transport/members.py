"""Who takes part in a transfer between processes, and which way it goes: pure, the same on every process.

Group ranks: the training ranks first, then the ranks of each engine replica in relay order. An engine rank that lives
in a training rank's process has that one's group rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from penstock.weights.planner.relay import Hop


class EngineRank(NamedTuple):
    """One tensor-parallel rank of one replica."""

    replica: int
    rank: int


class Route(NamedTuple):
    """Where the ranks of a plan are.

    Attributes:
        sources: Source rank of the plan -> group rank.
        replicas: By replica of the destination: destination rank of the plan -> group rank. The sources send to
            replica 0 only.
        hops: How the replicas pass it on.
    """

    sources: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True)
class Members:
    """Everyone in a group. When engines join or leave, a new group is made of new members.

    Attributes:
        num_training: Training ranks.
        engines: Name of each replica.
        tp_size: Ranks of each replica.
        colocated: Engine ranks that live in a training rank's process -> that training rank.
    """

    num_training: int
    engines: tuple[str, ...]
    tp_size: int = 1
    colocated: Mapping[EngineRank, int] = field(default_factory=dict)

    @cached_property
    def _engine_ranks(self) -> Mapping[EngineRank, int]:
        ranks: dict[EngineRank, int] = {}
        next_rank = self.num_training
        for replica in range(len(self.engines)):
            for rank in range(self.tp_size):
                member = EngineRank(replica, rank)
                if member in self.colocated:
                    ranks[member] = self.colocated[member]
                else:
                    ranks[member] = next_rank
                    next_rank += 1
        return ranks

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.num_training + len(self._engine_ranks) - len(self.colocated)

    def training(self, rank: int) -> int:
        """Group rank of a training rank."""
        return rank

    def engine(self, replica: int, rank: int) -> int:
        """Group rank of a replica's tensor-parallel rank."""
        return self._engine_ranks[EngineRank(replica, rank)]

    def name(self, group_rank: int) -> str:
        """What messages call a process."""
        if group_rank < self.num_training:
            return f"training rank {group_rank}"
        member = next(member for member, rank in self._engine_ranks.items() if rank == group_rank)
        return f"{self.engines[member.replica]} rank {member.rank}"

    def names(self, group_ranks: Sequence[int]) -> str:
        """Several of them."""
        return ", ".join(map(self.name, group_ranks))

    def to_engines(self, hops: tuple[Hop, ...]) -> Route:
        """From the training ranks to replica 0, and from there along `hops` (`relay_tree`) to all others.

        Replicas that no hop leads to get nothing.
        """
        replicas = tuple(
            tuple(self.engine(replica, rank) for rank in range(self.tp_size)) for replica in range(len(self.engines))
        )
        return Route(tuple(range(self.num_training)), replicas, hops)
