"""GPUs that processes use in turns (colocated): reserved once for all of them, and assigned to each by number.

Ray assigns fractions of GPUs arbitrarily: two actors of half a GPU may share one GPU or get one each, and an actor of
1.0 gets one GPU even if it is meant to share two. So whole GPUs are reserved in a placement group, Ray reports which
ones they are, and every process is placed on the node of its GPUs and sees them through `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.actors.ray_errors import ray_boundary, silence_limit
from penstock.dataflow.errors import PlacementError

RAY_LEAVES_DEVICES_ALONE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Devices of one process, all on one node.

    Attributes:
        bundle: Index of the bundle that contains them.
        devices: Their names in `CUDA_VISIBLE_DEVICES`.
    """

    group: PlacementGroup
    bundle: int
    devices: tuple[str, ...]

    def options(self) -> dict[str, Any]:
        """Arguments of `.options(...)`: placed in the bundle, without GPUs of its own, since the group has them all."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {"scheduling_strategy": strategy}

    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} | RAY_LEAVES_DEVICES_ALONE


@dataclass(frozen=True, slots=True)
class SharedDevices:
    """Reserved GPUs.

    Attributes:
        devices: By bundle: the GPUs of one node, in the order of the pool's slots.
    """

    group: PlacementGroup
    devices: tuple[tuple[str, ...], ...]

    def assign(self, first_slot: int, num_slots: int) -> DeviceAssignment:
        """Devices `first_slot` and the `num_slots` − 1 after it. They must be in one bundle."""
        width = len(self.devices[0])
        bundle, first = divmod(first_slot, width)
        held = self.devices[bundle][first : first + num_slots]
        assert len(held) == num_slots, "the planner makes bundles as wide as an engine"
        return DeviceAssignment(self.group, bundle, held)


async def reserve_devices(bundles: Sequence[int], accelerator_type: str | None, timeout_s: float) -> SharedDevices:
    """Reserve `bundles[i]` GPUs on one node for each bundle i, and find out which ones they are.

    Raises:
        PlacementError: If the cluster does not have them within the time limit.
    """
    extra = {f"accelerator_type:{accelerator_type}": 0.001} if accelerator_type else {}
    group = placement_group([{"GPU": float(count), **extra} for count in bundles], strategy="PACK")
    try:
        with ray_boundary(PlacementError, "cluster: reserving GPUs"):
            async with silence_limit(timeout_s):
                await group.ready()
                devices = await asyncio.gather(*(_gpus_of(group, index, count) for index, count in enumerate(bundles)))
    except TimeoutError:
        remove_placement_group(group)
        of_type = f", and needs those of type {accelerator_type}" if accelerator_type else ""
        raise PlacementError(
            f"cluster: {sum(bundles)} GPUs, {max(bundles)} at a time on one node, could not be reserved within "
            f"{timeout_s:.0f} s. Ray has {ray.available_resources().get('GPU', 0):g} of "
            f"{ray.cluster_resources().get('GPU', 0):g} GPUs free{of_type}. Use fewer "
            "trainer.num_ranks or rollout.num_engines, or a smaller rollout.engine.tensor_parallel_size."
        ) from None
    return SharedDevices(group, tuple(tuple(of_bundle) for of_bundle in devices))


def _gpus_of(group: PlacementGroup, bundle: int, count: int) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(visible_devices).options(num_cpus=0, num_gpus=count, scheduling_strategy=strategy).remote()


def visible_devices() -> list[str]:
    """The GPUs that Ray has given to this task."""
    return sorted(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]), key=lambda name: (len(name), name))
