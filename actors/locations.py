"""Where the engines of each node find a version that has crossed to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import WeightManifest


@dataclass(frozen=True, slots=True)
class Locations:
    """Node -> folder in its shared memory."""

    by_node: Mapping[str, str]


def at_node(manifest: WeightManifest, payload: Any, node_id: str) -> tuple[WeightManifest, Any]:
    """What an engine on a node is told, and given.

    Raises:
        WeightSyncError: If the version has not come to its node.
    """
    if not isinstance(payload, Locations):
        return manifest, payload
    if node_id not in payload.by_node:
        raise WeightSyncError(
            f"publish v{manifest.version}: it went to {len(payload.by_node)} nodes, not to node {node_id}. Engines "
            "may join where others are; a new node takes part from the next publish on."
        )
    return replace(manifest, location=payload.by_node[node_id]), None
