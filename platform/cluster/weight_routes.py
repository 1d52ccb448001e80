"""Selects the route of weights from the trainer to the engines, by the configuration and the nodes.

situation                                              route             weights.transport
adapters are trained (trainer.lora)                    adapters          auto
one node, trainer and engines on GPUs                  cuda_ipc          auto, cuda_ipc
one node otherwise, or with staging=bucket             shared_memory     auto, shared_memory
several nodes, both on their own GPUs                  engine_devices    auto, process_group    NCCL
the same or CPU pools, with staging=bucket             live_parameters   auto, process_group    NCCL, gloo
several nodes otherwise                                node_receivers    auto, process_group    gloo
engines of several layouts (extra_rollout_pools)       shared_memory on one node, else node_receivers
the layout of the model is unknown                     gather            gather
"""

from __future__ import annotations

from typing import Literal

from penstock.platform.config.schema import RunConfig

WeightRoute = Literal[
    "adapters", "cuda_ipc", "shared_memory", "engine_devices", "live_parameters", "node_receivers", "gather"
]
GROUP_ROUTES: tuple[WeightRoute, ...] = ("engine_devices", "live_parameters", "node_receivers")
"""Routes through a process group, which are the only ones that use codecs."""
DEVICE_BUFFER_ROUTES: tuple[WeightRoute, ...] = ("cuda_ipc", "engine_devices")
"""Routes with a buffer in the memory of each engine device."""
MULTI_LAYOUT_ROUTES: tuple[WeightRoute, ...] = ("shared_memory", "node_receivers")
"""Routes that can write a version in several layouts, for engines of different tensor-parallel sizes."""


def num_engine_layouts(config: RunConfig) -> int:
    """How many different shardings of the policy the engines need: one for each type and tensor-parallel size."""
    engines = {(view.rollout.engine.type, view.rollout.engine.tensor_parallel_size) for view in config.rollout_views}
    return len(engines)


def weight_route(config: RunConfig, *, is_one_node: bool | None = None) -> WeightRoute:
    """Return the weight route of a run.

    Args:
        config: The configuration of the run.
        is_one_node: Whether trainer and engines are on one node; None: assumed if `cluster.address` is local.
    """
    weights, cluster = config.weights, config.cluster
    is_one_layout = num_engine_layouts(config) == 1
    trainer, rollout = (cluster.pools[pool].device for pool in (cluster.trainer_pool, cluster.rollout_pool))
    if weights.transport == "auto":
        if config.trainer.lora is not None:
            return "adapters"
        if is_one_node if is_one_node is not None else cluster.address == "local":
            is_on_gpus = trainer == rollout == "gpu" and weights.staging == "shard"
            return "cuda_ipc" if is_on_gpus and is_one_layout else "shared_memory"
    elif weights.transport != "process_group":
        return weights.transport
    # NCCL does not allow two processes of a group on one GPU, and sender and receiver must use the same device type.
    # A receiver process can take several layouts at once; the group of the engines themselves has one.
    if trainer != rollout or (trainer == "gpu" and cluster.colocated) or not is_one_layout:
        return "node_receivers"
    if weights.staging == "bucket":
        return "live_parameters"
    return "engine_devices" if trainer == "gpu" else "node_receivers"
