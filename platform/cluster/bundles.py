"""The GPUs that a run reserves: bundles, each of which is on one node. Pure, from the placement plan."""

from __future__ import annotations

from penstock.actors.bundles import Bundle
from penstock.dataflow.ids import PolicyId
from penstock.platform.cluster.placement import Role, RolePlacement, plan_placement, shared_bundles
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import RunConfig

Process = tuple[Role, PolicyId, int]
"""A process of a run: role, policy, and rank or number."""


def device_bundles(config: RunConfig, command: Command = "train") -> list[Bundle]:
    """All GPUs that `command` reserves. The bundles that colocated roles use in turns come first.

    What communicates within every layer is on one node: the tensor-parallel ranks of an engine, and the ranks of the
    trainer that split a model or a sequence.
    """
    cluster, trainer = config.cluster, config.trainer
    shared_type = cluster.pools[cluster.trainer_pool].accelerator_type
    bundles = [Bundle(count, shared_type) for count in shared_bundles(config, command)]
    width = trainer.tensor_parallel_size * trainer.sequence_parallel_size
    together: dict[Process, list[RolePlacement]] = {}
    for placement in plan_placement(config, command):
        if placement.num_gpus:
            index = placement.index // width if placement.role == "trainer" else placement.index
            together.setdefault((placement.role, placement.policy_id, index), []).append(placement)
    for placements in together.values():
        pool = placements[0].pool
        bundles.append(
            Bundle(
                sum(int(placement.num_gpus) for placement in placements),
                None if pool is None else cluster.pools[pool].accelerator_type,
                tuple((placement.role, placement.policy_id, placement.index) for placement in placements),
            )
        )
    return bundles
