"""How replicas of an engine relay weights, so that the bytes the training ranks send do not grow with their number.

The training ranks send to the first replica only. Nodes form a tree in which each forwards every received bucket to at
most `fanout` others; on a node, the first replica forwards it to the other replicas. Replicas hold equal shards, so
rank r of a replica forwards its whole shard to rank r of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Hop(NamedTuple):
    """Replica `parent` forwards every bucket to replica `child`."""

    parent: int
    child: int


def relay_tree(nodes: Sequence[str], fanout: int = 2) -> tuple[Hop, ...]:
    """Hops that reach every replica once, parents before children.

    Args:
        nodes: Node of each replica; replica 0 gets the weights from the training ranks.
        fanout: Nodes that one node sends to.
    """
    first_on: dict[str, int] = {}
    hops: list[Hop] = []
    heads: list[int] = []
    for replica, node in enumerate(nodes):
        if node in first_on:
            hops.append(Hop(first_on[node], replica))
            continue
        if heads:
            hops.append(Hop(heads[(len(heads) - 1) // fanout], replica))
        first_on[node] = replica
        heads.append(replica)
    return tuple(hops)
