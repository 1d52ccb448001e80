"""Several rollout pools in one run: placement, memory, slots, layouts, and what is refused."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.actors.cluster import Resources
from penstock.actors.engine.client import RemoteEngine
from penstock.dataflow.errors import ConfigError, PlacementError
from penstock.dataflow.ids import EngineId
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster import actor_factory
from penstock.platform.cluster.actor_factory import RunActors, engine_index, engine_layout, engine_specs
from penstock.platform.cluster.memory import engine_memory, shared_gib
from penstock.platform.cluster.placement import device_load_gib, plan_placement
from penstock.platform.cluster.weight_routes import WeightRoute, weight_route
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.engine_monitor import EngineMonitor
from penstock.rollout.engine_pool.pool import make_pool
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.weights.layout.algebra import Layout
from tests.fakes import FakeEngine
from tests.unit.weights.models import engine_layout as frozen_layout

A100 = "+cluster.pools.a100={device: gpu, count: 8, memory_gib: 40, accelerator_type: A100, devices_per_node: 8}"
SAME = "cluster.extra_rollout_pools={a100: {num_engines: 3}}"
WIDE = (
    "cluster.extra_rollout_pools={a100: {num_engines: 3, engine: "
    "{type: vllm, tensor_parallel_size: 2, max_num_seqs: 48}}}"
)
ON_CPU = ["cluster.pools.a100.memory_gib=900", "rollout.engine.kv_cache_gib=4"]
NODES = "cluster.address=auto"


def composed(*overrides: str) -> RunConfig:
    return compose_config(["experiment=math_qwen_8gpu", A100, *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        composed(*overrides)
    (problem,) = raised.value.violations
    return problem


def test_engines_are_numbered_over_the_pools_and_each_has_the_devices_and_the_memory_of_its_own() -> None:
    config = composed(WIDE)
    engines = [one for one in plan_placement(config) if one.role == "engine"]
    assert [(one.index, one.pool, one.slot, one.num_slots) for one in engines] == [
        *((index, "generate", index, 1) for index in range(4)),
        *((4 + index, "a100", 2 * index, 2) for index in range(3)),
    ]
    wide = config.rollout_view_of(5)
    assert engines[5].memory == engine_memory(wide, config.cluster.pools["a100"])
    assert engines[5].memory.device["weights"] == pytest.approx(engines[0].memory.device["weights"] / 2)
    assert device_load_gib(config, engines)["a100"] < 40
    specs = engine_specs(config)
    assert [spec.engine_id for spec in specs] == [f"engine-{index}" for index in range(7)]
    assert [spec.engine.tensor_parallel_size for spec in specs] == [1] * 4 + [2] * 3
    assert config.rollout_view_of(7).cluster.rollout_pool == "generate", "an engine that joins"


def test_every_view_is_the_same_run() -> None:
    config = composed(WIDE)
    assert config.num_engines == 7
    for view in config.rollout_views:
        assert (view.num_engines, weight_route(view), shared_gib(view)) == (7, weight_route(config), shared_gib(config))
        assert sorted(view.cluster.extra_rollout_pools) == sorted({"generate", "a100"} - {view.cluster.rollout_pool})
    assert config.rollout_views[0].rollout == config.rollout
    plain = compose_config(["experiment=math_qwen_8gpu"])
    assert plain.rollout_views == (plain,)


@pytest.mark.parametrize(
    ("overrides", "route"),
    [
        ([SAME], "cuda_ipc"),
        ([WIDE], "shared_memory"),
        ([SAME, NODES], "engine_devices"),
        ([WIDE, NODES], "node_receivers"),
        ([WIDE, NODES, "weights.staging=bucket"], "node_receivers"),
    ],
)
def test_weights_take_a_route_with_as_many_layouts_as_there_are(overrides: list[str], route: WeightRoute) -> None:
    config = composed(*overrides)
    assert weight_route(config) == route
    one = composed(SAME, NODES, "weights.transport=shared_memory", "weights.staging=shard")
    two = composed(WIDE, NODES, "weights.transport=shared_memory", "weights.staging=shard")
    assert shared_gib(two) == 2 * shared_gib(one), "versions of both layouts are kept"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.extra_rollout_pools={a10: {num_engines: 1}}"], ["a10 is not a pool", "Did you mean a100?"]),
        (["cluster.extra_rollout_pools={generate: {num_engines: 1}}"], ["generate is cluster.rollout_pool, too"]),
        (["cluster.extra_rollout_pools={a100: {num_engines: 9}}"], ["cluster.pools.a100.count=8", "9 for engines"]),
        (
            ["cluster.extra_rollout_pools={a100: {num_engines: 1, engine: {type: vllm, kv_cache_gib: 30}}}"],
            ["cluster.pools.a100.memory_gib=40", "fullest GPU", "several for each engine"],
        ),
        (
            ["cluster.extra_rollout_pools={a100: {num_engines: 2, engine: {type: vllm, kv_cache_gib: 0.01}}}"],
            ["cluster.extra_rollout_pools.a100.engine.kv_cache_gib", "does not hold one trajectory"],
        ),
        (
            ["cluster.extra_rollout_pools={a100: {num_engines: 1, engine: {type: vllm, tensor_parallel_size: 3}}}"],
            ["cluster.extra_rollout_pools.a100.engine.tensor_parallel_size=3", "num_heads 28"],
        ),
        (
            [WIDE, "cluster.pools.a100.devices_per_node=3"],
            ["devices_per_node=3", "engine 5", "devices 2 to 3", "several nodes"],
        ),
        (
            [
                "cluster.pools.train.devices_per_node=2",
                "trainer.sequence_parallel_size=4",
                "model.attention=varlen",
            ],
            ["devices_per_node=2", "ranks 0 to 3", "trainer.sequence_parallel_size=4", "devices 0 to 3"],
        ),
        ([WIDE, "weights.transport=cuda_ipc"], ["vllm over 1 on generate and vllm over 2 on a100", "one layout"]),
        ([WIDE, "weights.codec=int8_delta", NODES], ["weights.codec=int8_delta", "tensor_parallel_size=2"]),
        (
            [SAME, "cluster.pools.a100.device=cpu", *ON_CPU],
            ["a100 is a cpu pool", "generate is a gpu pool"],
        ),
        ([WIDE, "trainer.lora.rank=8"], ["the route adapters sends one layout", "weights.transport=shared_memory"]),
    ],
)
def test_what_cannot_run_together_is_refused(overrides: list[str], words: list[str]) -> None:
    problem = refusal(*overrides)
    assert all(word in problem for word in words), problem


def test_engines_of_several_pools_do_not_take_turns_with_the_trainer() -> None:
    held = ["experiment=gsm8k_qwen_1gpu", A100, "cluster.extra_rollout_pools={a100: {num_engines: 1}}"]
    with pytest.raises(ConfigError, match=r"extra_rollout_pools=a100 with cluster\.colocated=true"):
        compose_config(held)


async def test_every_engine_has_the_slots_of_its_pool_also_after_a_restart() -> None:
    config = composed(WIDE)
    engines = [FakeEngine(EngineId(f"engine-{index}")) for index in (0, 4)]
    pool = make_pool(engines, config.rollout, 0, [16, 4])
    pool.fence(EngineId("engine-4"), "planted")
    pool.add(FakeEngine(EngineId("engine-4")))
    assert {view.engine_id: view.max_slots for view in pool.views()} == {"engine-0": 16, "engine-4": 4}
    monitor = EngineMonitor(pool, adapts_concurrency=True)
    await monitor.poll()
    assert {view.engine_id: view.limit for view in pool.views()} == {"engine-0": 16, "engine-4": 4}


class Holding:
    """An engine that holds the policy in a given layout."""

    def __init__(self, index: int, layout: Layout) -> None:
        self.engine_id = EngineId(f"engine-{index}")
        self.shards: range | None = None
        self.num_asked = 0
        self._layout = layout

    async def layout(self, _tensors: object) -> Layout:
        self.num_asked += 1
        return self._layout


def holding(config: RunConfig, *layouts: int) -> list[Any]:
    return [Holding(index, frozen_layout("qwen2", layouts[index])) for index in range(config.num_engines)]


async def test_one_engine_of_each_pool_is_asked_and_all_learn_which_ranks_are_theirs() -> None:
    config = composed(WIDE)
    engines = holding(config, 1, 1, 1, 1, 2, 2, 2)
    layout, ranks = await engine_layout(config, cast("list[RemoteEngine]", engines), (), "shared_memory")
    assert (layout.tp_size, ranks) == (3, {"generate": range(1), "a100": range(1, 3)})
    assert [engine.shards for engine in engines] == [range(1)] * 4 + [range(1, 3)] * 3
    assert [engine.num_asked for engine in engines] == [1, 0, 0, 0, 1, 0, 0]


async def test_pools_of_one_layout_share_it() -> None:
    config = composed(SAME)
    engines = holding(config, *[2] * 7)
    layout, ranks = await engine_layout(config, cast("list[RemoteEngine]", engines), (), "cuda_ipc")
    assert (layout.tp_size, ranks, engines[5].shards) == (2, {}, None)


async def test_layouts_that_differ_although_the_settings_are_equal_are_refused_on_a_route_of_one_layout() -> None:
    config = composed(SAME)
    engines = holding(config, 1, 1, 1, 1, 2, 2, 2)
    with pytest.raises(PlacementError, match="generate and a100 hold the policy in 2 layouts, but the route cuda_ipc"):
        await engine_layout(config, cast("list[RemoteEngine]", engines), (), "cuda_ipc")


async def test_an_engine_that_is_started_again_has_the_settings_and_the_ranks_of_its_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[EngineSpec, Resources]] = []

    async def start_engines(specs: list[EngineSpec], needs: list[Resources], _timeout_s: float) -> list[Any]:
        started.extend(zip(specs, needs, strict=True))
        return [Holding(engine_index(specs[0].engine_id), frozen_layout("qwen2", 1))]

    monkeypatch.setattr(actor_factory, "start_engines", start_engines)
    actors = RunActors([], *[None] * 5, shards={"generate": range(1), "a100": range(1, 3)})  # type: ignore[arg-type]
    config = composed(WIDE)
    again, joined = [await actors.start_engine(config, index) for index in (6, 7)]
    assert (again.shards, joined.shards) == (range(1, 3), range(1))
    assert [(spec.engine.tensor_parallel_size, need.num_gpus) for spec, need in started] == [(2, 2.0), (1, 1.0)]
    assert [need.accelerator_type for _, need in started] == ["A100", None]
