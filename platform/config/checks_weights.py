"""Cross-field checks of how weights travel, and how engines take a version: few, since `transport` decides most."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.platform.config.findings import Finding, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.platform.transports import GROUP_WAYS, way_of


def check_weights(config: RunConfig) -> Iterator[Finding]:
    """What cannot be together: a row for each pair of keys, with the reason and what to do."""
    weights, cluster, tp_size = config.weights, config.cluster, config.rollout.engine.tensor_parallel_size
    way, num_engines = way_of(config), config.rollout.num_engines
    drains, streams = weights.update_mode in ("drain", "multi_version"), weights.staging == "bucket"
    devices = {cluster.pools[pool].device for pool in (cluster.trainer_pool, cluster.rollout_pool)}
    for is_wrong, one, other, why in (
        (
            drains and cluster.colocated,
            "weights.update_mode",
            "cluster.colocated",
            "the engines sleep while the trainer computes, so at a publish no request runs that could be drained, and "
            "no engine may serve meanwhile. Use weights.update_mode=keep_kv.",
        ),
        (
            weights.update_mode == "multi_version" and num_engines < 2,
            "weights.update_mode",
            "rollout.num_engines",
            "while one engine is updated the others serve, and there are none. Use 2 or more engines, or "
            "weights.update_mode=drain.",
        ),
        (
            weights.overlap and drains,
            "weights.overlap",
            "weights.update_mode",
            "requests that start wait for the first engine to have the version, which would be until its requests have "
            "ended, and its slots would stand empty. Use keep_kv or recompute_kv.",
        ),
        (
            weights.overlap and cluster.colocated,
            "weights.overlap",
            "cluster.colocated",
            "the engines sleep while the trainer computes. Use weights.overlap=false.",
        ),
        (
            weights.overlap and streams,
            "weights.staging",
            "weights.overlap",
            "engines stand still while a version comes, and the trainer would no longer have it. Use "
            "weights.staging=shard, or weights.overlap=false.",
        ),
        (
            weights.codec != "full" and streams,
            "weights.staging",
            "weights.codec",
            "a difference needs the version before, which a broken stream has written over. Use weights.staging=shard, "
            "or weights.codec=full.",
        ),
        (
            weights.update_mode == "multi_version" and way == "live_parameters",
            "weights.staging",
            "weights.update_mode",
            "by a process group a version comes to all engines at once, and none would serve meanwhile. Use "
            "weights.staging=shard, or another weights.update_mode.",
        ),
        (
            weights.transport == "cuda_ipc" and streams,
            "weights.transport",
            "weights.staging",
            "its slots are second shards. Use weights.staging=shard, or weights.transport=auto.",
        ),
        (
            weights.transport == "cuda_ipc" and len(devices) > 1,
            "weights.transport",
            "cluster.trainer_pool",
            "trainer and engines are on pools of different devices. Use weights.transport=auto.",
        ),
        (
            weights.codec == "int8_delta" and tp_size > 1,
            "weights.codec",
            "rollout.engine.tensor_parallel_size",
            "it rounds for each device on its own, so parameters that all devices hold would differ between them. Use "
            "delta.",
        ),
        (
            weights.transport == "gather" and tp_size > 1,
            "weights.transport",
            "rollout.engine.tensor_parallel_size",
            "whole tensors cannot be compared with what each of the ranks holds of them. Use weights.transport=auto.",
        ),
    ):
        if is_wrong:
            yield error(f"{one}={_value(config, one)} with {other}={_value(config, other)}: {why}")
    if weights.codec != "full" and way not in GROUP_WAYS:
        yield warning(
            f"weights.codec={weights.codec} has no effect with weights.transport={weights.transport} and "
            f"cluster.address={cluster.address}: only a process group uses it, and versions go by {way}."
        )


def _value(config: RunConfig, key: str) -> str:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return str(value).lower() if isinstance(value, bool) else str(value)
