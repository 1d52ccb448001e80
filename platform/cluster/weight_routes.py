"""Which way a version takes from the trainer to the engines: one per situation, by the configuration and the nodes.

situation                                              way               weights.transport
the trainer trains adapters (trainer.lora)             adapters          auto
one node, trainer and engines on GPUs                  cuda_ipc          auto, cuda_ipc
one node otherwise, or with staging=bucket             shared_memory     auto, shared_memory
several nodes, both on GPUs of their own               engine_devices    auto, process_group    NCCL
the same, or CPU pools, with staging=bucket            live_parameters   auto, process_group    NCCL, gloo
several nodes otherwise                                node_receivers    auto, process_group    gloo
the model's layout is not known                        gather            gather
"""

from __future__ import annotations

from typing import Literal

from penstock.platform.config.schema import RunConfig

WeightRoute = Literal[
    "adapters", "cuda_ipc", "shared_memory", "engine_devices", "live_parameters", "node_receivers", "gather"
]
GROUP_ROUTES: tuple[WeightRoute, ...] = ("engine_devices", "live_parameters", "node_receivers")
"""Those of a process group, which codecs are for."""
SLOT_ROUTES: tuple[WeightRoute, ...] = ("cuda_ipc", "engine_devices")
"""Those that keep a slot in memory of each engine's devices."""


def weight_route(config: RunConfig, *, is_one_node: bool | None = None) -> WeightRoute:
    """The way of a run's versions.

    Args:
        config: Of the run.
        is_one_node: Whether trainer and engines are on one node; None: before the start, when `cluster.address` tells.
    """
    weights, cluster = config.weights, config.cluster
    trainer, rollout = (cluster.pools[pool].device for pool in (cluster.trainer_pool, cluster.rollout_pool))
    if weights.transport == "auto":
        if config.trainer.lora is not None:
            return "adapters"
        if is_one_node if is_one_node is not None else cluster.address == "local":
            return "cuda_ipc" if trainer == rollout == "gpu" and weights.staging == "shard" else "shared_memory"
    elif weights.transport != "process_group":
        return weights.transport
    # NCCL takes no two processes of one GPU into a group, and both ends of a message must be of one kind of device.
    if trainer != rollout or (trainer == "gpu" and cluster.colocated):
        return "node_receivers"
    if weights.staging == "bucket":
        return "live_parameters"
    return "engine_devices" if trainer == "gpu" else "node_receivers"
