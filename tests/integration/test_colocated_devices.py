"""Which GPUs colocated processes get from Ray: its GPUs here are numbers, the actors and what they ask for are the real
ones. Nothing computes on them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import ray

from penstock.actors import devices as devices_of_a_run
from penstock.actors.bundles import Bundle
from penstock.actors.cluster import engine_actor, trainer_ranks
from penstock.actors.devices import reserve_devices
from penstock.dataflow.errors import PlacementError
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.actor_factory import (
    engine_specs,
    reserve_run_devices,
    resources,
    torch_environment,
    trainer_spec,
)
from penstock.platform.cluster.placement import plan_placement, shared_bundles
from penstock.platform.config.schema import RunConfig

from .logical_gpus import ray_with_gpus

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(180),
]
NUM_GPUS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def four_gpus() -> AsyncIterator[None]:
    async with ray_with_gpus(NUM_GPUS):
        yield


def colocated(ranks: int, engines: int, width: int) -> RunConfig:
    """Its model is not on this machine, and none is loaded."""
    return compose_config(
        [
            "experiment=gsm8k_qwen_1gpu",
            f"cluster.pools.gpu.count={NUM_GPUS}",
            f"trainer.num_ranks={ranks}",
            f"rollout.num_engines={engines}",
            f"rollout.engine.tensor_parallel_size={width}",
        ]
    )


async def seen(actor: Any) -> list[str]:
    """The GPUs that a process sees, by their names on its node."""
    return (await actor.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"])).split(",")


@pytest.mark.parametrize(
    ("ranks", "engines", "width"), [(4, 2, 2), (4, 4, 1), (4, 1, 2), (2, 2, 2), (2, 2, 1)], ids=str
)
async def test_ranks_and_engines_get_the_whole_devices_of_their_slots(
    four_gpus: None, ranks: int, engines: int, width: int
) -> None:
    config = colocated(ranks, engines, width)
    devices = await reserve_run_devices(config)
    assert devices is not None
    actors: dict[str, Any] = {}
    try:
        needs = resources(config, "trainer", "train", devices)
        of_ranks = trainer_ranks(trainer_spec(config), needs, torch_environment(config, "cuda"))
        actors |= {f"trainer-{rank}": actor for rank, actor in enumerate(of_ranks)}
        needs = resources(config, "engine", "train", devices)
        of_engines = [engine_actor(spec, need) for spec, need in zip(engine_specs(config), needs, strict=True)]
        actors |= {f"engine-{index}": actor for index, actor in enumerate(of_engines)}
        visible = {name: await seen(actor) for name, actor in actors.items()}
        free = ray.available_resources().get("GPU", 0.0)
    finally:
        for actor in actors.values():
            ray.kill(actor)
        ray.util.remove_placement_group(devices.group)
    by_slot: dict[int, set[str]] = {}
    for placement in plan_placement(config):
        name = f"{placement.role}-{placement.index}"
        if name in visible:
            held = visible[name]
            assert len(held) == len(set(held)) == placement.num_slots, "as many GPUs as it has slots"
            for slot, device in enumerate(held, start=placement.slot):
                by_slot.setdefault(slot, set()).add(device)
    assert all(len(names) == 1 for names in by_slot.values()), f"who shares a slot shares a GPU: {by_slot}"
    assert len(set.union(*by_slot.values())) == len(by_slot) == max(ranks, engines * width), "a GPU for each slot"
    assert free == NUM_GPUS - sum(shared_bundles(config)), "exactly the bundles are reserved"


async def test_gpus_that_the_cluster_does_not_have_together_are_refused(four_gpus: None) -> None:
    asked = r"10 GPUs \(2 x 5 of one node\) could not be reserved within 1 s; free are 4 of 4 on "
    with pytest.raises(PlacementError, match=asked):
        await reserve_devices([Bundle(5), Bundle(5)], timeout_s=1.0)
    with pytest.raises(PlacementError, match=r"1 GPUs \(1 x 1 H100\) could not be reserved"):
        await reserve_devices([Bundle(1, "H100")], timeout_s=1.0)


async def test_two_runs_do_not_hold_half_of_their_gpus_each(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices_of_a_run, "FIRST_NOTE_S", 0.2)
    first = await reserve_devices([Bundle(1, None, (name,)) for name in ("a", "b", "c")], timeout_s=30.0)
    try:
        with pytest.raises(PlacementError, match=r"2 GPUs \(2 x 1\) .*; free are 1 of 4 on .*all its GPUs or none"):
            await reserve_devices([Bundle(1, None, (name,)) for name in ("a", "b")], timeout_s=1.0)
        assert [line.partition(" on ")[0] for line in caplog.messages] == [
            "cluster: reserving GPUs: waiting for 2 GPUs (2 x 1); free are 1 of 4"
        ]
        third = await reserve_devices([Bundle(1, None, ("a",))], timeout_s=30.0)  # the second run holds nothing
        ray.util.remove_placement_group(third.group)
    finally:
        ray.util.remove_placement_group(first.group)


async def test_processes_with_their_own_gpus_get_those_of_their_bundle(four_gpus: None) -> None:
    overrides = ["experiment=math_qwen_8gpu", "trainer.num_ranks=2", "trainer.sequence_parallel_size=2"]
    config = compose_config([*overrides, "rollout.num_engines=1", "rollout.engine.tensor_parallel_size=2"])
    devices = await reserve_run_devices(config)
    assert devices is not None
    actors: list[Any] = []
    try:
        needs = resources(config, "trainer", "train", devices)
        actors += trainer_ranks(trainer_spec(config), needs, torch_environment(config, "cuda"))
        engine = engine_actor(engine_specs(config)[0], resources(config, "engine", "train", devices)[0])
        actors.append(engine)
        visible = [await seen(actor) for actor in actors]
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(devices.group)
    assert [len(held) for held in visible] == [1, 1, 2]
    assert len({name for held in visible for name in held}) == 4
