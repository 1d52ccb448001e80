"""Where versions are written within a node: main memory or that of the engines' devices, by the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from penstock.platform.config.schema import RunConfig


def slots_on(config: RunConfig) -> Literal["host", "device"]:
    """What `weights.memory` comes to."""
    if config.weights.memory != "auto":
        return config.weights.memory
    is_by_handle = config.cluster.address == "local" and config.weights.transport == "auto"
    has_gpus = config.cluster.pools[config.cluster.rollout_pool].device == "gpu"
    return "device" if has_gpus and is_by_handle and not list(against_device(config)) else "host"


def against_device(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Why versions cannot be written into device memory: key, its value, and the reason."""
    weights, cluster = config.weights, config.cluster
    if weights.mode == "gather":
        yield "weights.mode", weights.mode, "whole tensors go through a file to the engine's own loader"
    if weights.codec == "lora":
        yield (
            "weights.codec",
            weights.codec,
            "adapters go through a file, and engines make the weights",
        )
    if weights.transport == "shared_memory":
        yield "weights.transport", weights.transport, "that is main memory"
    if weights.transport == "group" and cluster.colocated:
        yield "cluster.colocated", "true", "NCCL takes no two processes of one GPU into a group"
    if weights.stage_on == "host":
        yield (
            "weights.stage_on",
            "host",
            "a version in device memory is staged where it lies",
        )
    if weights.staging == "bucket" and weights.transport != "group":
        yield (
            "weights.staging",
            "bucket",
            "a slot there is a second shard; with weights.transport=group versions need none",
        )
    trainer, rollout = cluster.pools[cluster.trainer_pool].device, cluster.pools[cluster.rollout_pool].device
    if trainer != rollout:
        both = f"the trainer is on a {trainer} pool and the engines are on a {rollout} pool"
        yield "cluster.trainer_pool", cluster.trainer_pool, both
