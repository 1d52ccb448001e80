"""Where Ray is told to start a process that asks for no resources."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.cluster import Resources, node_ids


def node(name: str, address: str, *, alive: bool = True, cpus: float = 2.0) -> dict[str, Any]:
    return {
        "NodeID": name * 56,
        "NodeManagerAddress": address,
        "Alive": alive,
        "Resources": {"CPU": cpus} if cpus else {},
    }


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Of a cluster: a head without CPUs, two workers, and one that was lost."""
    made = [
        node("d", "10.0.0.1", cpus=0),
        node("b", "10.0.0.3"),
        node("a", "10.0.0.2"),
        node("c", "10.0.0.4", alive=False),
    ]
    monkeypatch.setattr(ray, "nodes", lambda: made)
    return made


def test_processes_are_dealt_to_living_nodes_with_cpus_in_the_order_of_their_addresses() -> None:
    assert node_ids() == ["a" * 56, "b" * 56]


def test_a_process_is_started_on_its_node_and_on_any_other_once_that_is_lost(nodes: list[dict[str, Any]]) -> None:
    need = Resources(near="a" * 56)
    strategy = need.options({})["scheduling_strategy"]
    assert isinstance(strategy, NodeAffinitySchedulingStrategy)
    assert (strategy.node_id, strategy.soft) == (need.near, False), "Ray ignores soft affinity of such processes"
    nodes[2]["Alive"] = False
    assert "scheduling_strategy" not in need.options({})
