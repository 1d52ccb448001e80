"""The GPUs of a run: reserved together in one placement group before any process starts, in bundles of one node each.

So a run has all its GPUs or none: two runs on one cluster never wait for each other's other half. What communicates
within every layer (the ranks of an engine, those that split a sequence) is in one bundle and so on one node.

A process with GPUs of its own is placed in its bundle, and Ray gives it the GPUs there. Colocated processes use GPUs in
turns. Ray would assign fractions of GPUs arbitrarily: two actors of half a GPU may share one GPU or get one each, and
an actor of 1.0 gets one GPU even if it is meant to share two. So for these bundles Ray reports which GPUs they are, and
every process is placed on the node of its GPUs and sees them through `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.actors.bundles import Bundle, described
from penstock.actors.ray_errors import noting, ray_boundary, silence_limit
from penstock.dataflow.errors import PlacementError

FIRST_NOTE_S = 2.0
"""GPUs that are free are reserved faster."""
RAY_LEAVES_DEVICES_ALONE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass(frozen=True, slots=True)
class BundlePlace:
    """The bundle in which a process has GPUs of its own."""

    group: PlacementGroup
    bundle: int

    def options(self, num_gpus: float) -> dict[str, Any]:
        """Arguments of `.options(...)`."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {"num_gpus": num_gpus, "scheduling_strategy": strategy}


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Devices of one process, all on one node."""

    group: PlacementGroup
    bundle: int
    """Index of the bundle that contains them."""
    devices: tuple[str, ...]
    """Their names in `CUDA_VISIBLE_DEVICES`."""

    def options(self) -> dict[str, Any]:
        """Arguments of `.options(...)`: placed in the bundle, without GPUs of its own, since the group has them all."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {"scheduling_strategy": strategy}

    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} | RAY_LEAVES_DEVICES_ALONE


@dataclass(slots=True)
class ReservedDevices:
    """Reserved GPUs."""

    group: PlacementGroup
    """With all bundles."""
    bundles: Sequence[Bundle]
    """In the order of the group."""
    shared: tuple[tuple[str, ...], ...] = ()
    """GPUs of each bundle that roles use in turns, in the order of the pool's slots. These bundles come first."""
    free: list[int] = field(default_factory=list)
    """Indices of bundles whose process has ended for good, such as an engine that has left."""
    _bundle_of: dict[Hashable, int] = field(init=False)

    def __post_init__(self) -> None:
        self._bundle_of = {process: index for index, one in enumerate(self.bundles) for process in one.processes}

    def assign(self, first_slot: int, num_slots: int) -> DeviceAssignment:
        """Shared devices `first_slot` and the `num_slots` − 1 after it. They must be in one bundle."""
        width = len(self.shared[0])
        bundle, first = divmod(first_slot, width)
        held = self.shared[bundle][first : first + num_slots]
        assert len(held) == num_slots, "the planner makes bundles as wide as an engine"
        return DeviceAssignment(self.group, bundle, held)

    def place(self, process: Hashable) -> BundlePlace | None:
        """The bundle of a process; None if it has none, because it has joined later."""
        index = self._bundle_of.get(process)
        return None if index is None else BundlePlace(self.group, index)

    def release(self, process: Hashable) -> None:
        """Make the bundle of a process that has ended for good available to one that joins."""
        index = self._bundle_of.pop(process, None)
        if index is not None:
            self.free.append(index)

    def reuse(self, process: Hashable, num_gpus: int, accelerator_type: str | None) -> None:
        """Give a process that joins a free bundle of its size, if there is one; else Ray looks for other GPUs."""
        for index in self.free:
            if (self.bundles[index].num_gpus, self.bundles[index].accelerator_type) == (num_gpus, accelerator_type):
                self.free.remove(index)
                self._bundle_of[process] = index
                return


async def reserve_devices(bundles: Sequence[Bundle], timeout_s: float) -> ReservedDevices:
    """Reserve all bundles or none, and find out which GPUs those without a process of their own are.

    A wait is logged when it begins and each minute, with the bundles and the GPUs that are free.

    Raises:
        PlacementError: If the cluster does not have them free within the time limit.
    """
    asked = described(bundles)
    group = placement_group([_ray_bundle(one) for one in bundles], strategy="PACK")
    shared = [(index, one.num_gpus) for index, one in enumerate(bundles) if not one.processes]
    what = "cluster: reserving GPUs"
    try:
        with ray_boundary(PlacementError, what):
            async with silence_limit(timeout_s):
                async with noting(what, lambda: f"{asked}; free are {_free_gpus()}", timeout_s, FIRST_NOTE_S):
                    await group.ready()
                devices = await asyncio.gather(*(_gpus_of(group, index, count) for index, count in shared))
    except TimeoutError:
        remove_placement_group(group)
        raise PlacementError(
            f"cluster: {asked} could not be reserved within {timeout_s:.0f} s; free are {_free_gpus()}. "
            "A run takes all its GPUs or none: wait until other runs have ended, or use fewer trainer.num_ranks or "
            "rollout.num_engines, or a smaller rollout.engine.tensor_parallel_size."
        ) from None
    return ReservedDevices(group, bundles, tuple(tuple(of_bundle) for of_bundle in devices))


def _ray_bundle(bundle: Bundle) -> dict[str, float]:
    label = {f"accelerator_type:{bundle.accelerator_type}": 0.001} if bundle.accelerator_type else {}
    return {"GPU": float(bundle.num_gpus), **label}


def _free_gpus() -> str:
    """The free GPUs of every node that has some."""
    free = available_resources_per_node()
    told = []
    for node in ray.nodes():
        resources: Mapping[str, float] = node["Resources"]
        if node["Alive"] and resources.get("GPU"):
            kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
            left = free.get(node["NodeID"], {}).get("GPU", 0.0)
            kind = f" {', '.join(kinds)}" if kinds else ""
            told.append(f"{left:g} of {resources['GPU']:g}{kind} on {node['NodeManagerAddress']}")
    return "; ".join(told) or "none, since no node has GPUs"


def _gpus_of(group: PlacementGroup, bundle: int, count: int) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(visible_devices).options(num_cpus=0, num_gpus=count, scheduling_strategy=strategy).remote()


def visible_devices() -> list[str]:
    """The GPUs that Ray has given to this task."""
    return sorted(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]), key=lambda name: (len(name), name))


def seen_devices() -> list[str]:
    """Names of the GPUs that this process sees, in `CUDA_VISIBLE_DEVICES`; none if it is not set."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
