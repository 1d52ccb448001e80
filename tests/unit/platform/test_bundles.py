"""Which GPUs a run reserves together, and who uses them."""

from __future__ import annotations

from typing import cast

import pytest
from ray.util.placement_group import PlacementGroup

from penstock.actors.bundles import Bundle, described
from penstock.actors.devices import ReservedDevices
from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import PARTNER, POLICY
from penstock.platform.cluster import actor_factory
from penstock.platform.cluster.actor_factory import RunActors, resources
from penstock.platform.cluster.placement import device_bundles
from penstock.platform.config.compose import compose_all
from penstock.platform.config.schema import RunConfig

NO_GROUP = cast("PlacementGroup", None)


def configured(*overrides: str) -> RunConfig:
    composition = compose_all(["experiment=math_qwen_8gpu", *overrides])
    assert composition.config is not None, composition.problems
    return composition.config


def sizes(config: RunConfig, role: str) -> list[tuple[int, tuple[int, ...]]]:
    """Size, and ranks or numbers, of the bundles of a role."""
    return [
        (bundle.num_gpus, tuple(index for _, _, index in bundle.processes))
        for bundle in device_bundles(config)
        if bundle.processes and bundle.processes[0][0] == role
    ]


def test_each_rank_and_each_engine_has_a_bundle() -> None:
    config = configured()
    assert sizes(config, "trainer") == [(1, (rank,)) for rank in range(4)]
    assert sizes(config, "engine") == [(1, (index,)) for index in range(4)]
    assert {bundle.accelerator_type for bundle in device_bundles(config)} == {None}
    assert device_bundles(config, "eval") == device_bundles(config)[4:]


@pytest.mark.parametrize("split", ["sequence_parallel_size", "tensor_parallel_size"])
def test_an_engine_and_ranks_that_split_a_sequence_or_a_model_are_on_one_node(split: str) -> None:
    config = configured(f"trainer.{split}=2", "rollout.engine.tensor_parallel_size=4", "rollout.num_engines=1")
    assert sizes(config, "trainer") == [(2, (0, 1)), (2, (2, 3))]
    assert sizes(config, "engine") == [(4, (0,))]


def test_bundles_have_the_label_of_their_pool() -> None:
    config = configured("cluster.pools.train.accelerator_type=H100", "cluster.pools.generate.accelerator_type=L40S")
    assert [bundle.accelerator_type for bundle in device_bundles(config)] == ["H100"] * 4 + ["L40S"] * 4


def test_colocated_roles_use_bundles_in_turns_that_hold_an_engine_and_a_group_of_ranks() -> None:
    shared = ["cluster=one_gpu", "cluster.pools.gpu.count=8", "trainer.num_ranks=8"]
    config = configured(*shared, "rollout.num_engines=4", "rollout.engine.tensor_parallel_size=2")
    assert device_bundles(config) == [Bundle(2)] * 4
    assert device_bundles(configured(*shared, "rollout.num_engines=8", "trainer.sequence_parallel_size=4")) == (
        [Bundle(4)] * 2
    )
    assert [bundle.processes for bundle in device_bundles(config, "eval")] == [
        (("engine", POLICY, index),) for index in range(4)
    ]


def test_a_dry_run_says_what_is_reserved() -> None:
    config = configured("trainer.sequence_parallel_size=2", "cluster.pools.train.accelerator_type=H100")
    assert described(device_bundles(config)) == "8 GPUs (2 x 2 H100 of one node, 4 x 1)"


def test_processes_on_cpus_reserve_nothing() -> None:
    config = compose_all(["experiment=arithmetic"]).config
    assert config is not None
    assert device_bundles(config) == []


def test_every_process_gets_its_place() -> None:
    config = configured("rollout.engine.tensor_parallel_size=2", "rollout.num_engines=2")
    devices = ReservedDevices(NO_GROUP, device_bundles(config))
    trainer, engines = (resources(config, role, "train", devices) for role in ("trainer", "engine"))
    assert [need.place.bundle for need in trainer if need.place] == [0, 1, 2, 3]
    assert [(need.place.bundle, need.num_gpus) for need in engines if need.place] == [(4, 2.0), (5, 2.0)]
    options = engines[0].options({})
    assert (options["num_gpus"], options["scheduling_strategy"].placement_group_bundle_index) == (2.0, 4)
    assert all(need.place is None for need in resources(config, "reward", "train", devices))
    assert resources(config, "engine", "train")[0].options({})["num_gpus"] == 2.0, "without reserved devices"


def test_a_partner_has_places_of_its_own() -> None:
    partner = "+partner={model: ${model}}"
    config = configured("cluster.pools.train.count=8", "cluster.pools.generate.count=8", partner)
    devices = ReservedDevices(NO_GROUP, device_bundles(config))
    places = {
        (role, policy_id): [
            need.place.bundle for need in resources(view, role, "train", devices, policy_id) if need.place
        ]
        for policy_id, view in ((POLICY, config), (PARTNER, config.partner_view))
        for role in ("trainer", "engine")
    }
    assert [len(of_role) for of_role in places.values()] == [4, 4, 4, 4]
    assert sorted(bundle for of_role in places.values() for bundle in of_role) == list(range(16))


async def test_an_engine_that_cannot_start_gives_its_bundle_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_engines(*_arguments: object) -> None:
        places.append(devices.place(("engine", POLICY, 0)))
        raise EngineLostError("planted: out of memory")

    places: list[object] = []
    monkeypatch.setattr(actor_factory, "start_engines", start_engines)
    devices = ReservedDevices(NO_GROUP, [Bundle(1)], free=[0])
    actors = RunActors([], *[None] * 5, devices=devices)  # type: ignore[arg-type]
    with pytest.raises(EngineLostError, match="planted"):
        await actors.started(configured())
    assert places[0] is not None, "it was to start there"
    assert devices.free == [0]


def test_an_engine_that_joins_takes_the_bundle_of_one_of_its_size_that_has_left() -> None:
    bundles = [Bundle(1, None, ("a",)), Bundle(2, "H100", ("b",)), Bundle(2, None, ("c",))]
    devices = ReservedDevices(NO_GROUP, bundles)
    devices.reuse("d", 2, None)
    assert devices.place("d") is None, "nobody has left"
    for process in ("a", "b", "c", "not reserved"):
        devices.release(process)
    devices.reuse("d", 2, None)
    place = devices.place("d")
    assert place is not None
    assert place.bundle == 2
    assert devices.free == [0, 1]
    assert devices.place("c") is None
    devices.reuse("e", 2, None)
    assert devices.place("e") is None
