"""Where Ray is told to start a process that asks for no resources."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors import episodes
from penstock.actors.cluster import Resources, node_ids
from penstock.actors.frozen_policies import FrozenPolicyClient, start_frozen_policies
from penstock.envs.config import EnvConfig, EpisodeConfig


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


async def test_a_frozen_policy_is_started_elsewhere_once_its_node_is_lost(
    nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[bool] = []
    starts: list[Callable[[], object]] = []

    async def start(client: FrozenPolicyClient) -> None:
        starts.extend(worker.start for worker in client._workers)

    def options(**given: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda _spec: placed.append("scheduling_strategy" in given))

    monkeypatch.setattr(ray, "remote", lambda _actor: SimpleNamespace(options=options))
    monkeypatch.setattr(FrozenPolicyClient, "start", start)
    await start_frozen_policies("reference", None, [Resources(near="a" * 56)], {}, 1.0)  # type: ignore[arg-type]
    placed.clear()
    starts[0]()
    nodes[2]["Alive"] = False
    starts[0]()
    assert placed == [True, False]


async def test_environments_are_spread_over_the_nodes_for_work_and_the_drivers(
    nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = SimpleNamespace(get_node_id=lambda: "b" * 56)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: of)
    found: list[str] = []
    monkeypatch.setattr(episodes, "DriverEpisodes", lambda env, _seed: SimpleNamespace(env=env))
    monkeypatch.setattr(episodes, "_on_node", lambda node, _env, _seed: found.append(node["NodeID"]))
    monkeypatch.setattr(episodes, "SpreadEpisodes", list)
    env = EnvConfig(factory="arithmetic", episode=EpisodeConfig(num_workers=6))
    assert len(episodes.spread_episodes(env, 0)) == 2  # type: ignore[arg-type]
    assert found == ["a" * 56]
