"""Cross-field checks of roles against pools: devices, slots and estimated memory."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from penstock.platform.config.findings import Command, Finding
from penstock.platform.config.schema import RunConfig
from penstock.platform.memory import GIB, kv_cache_gib, sequence_kv_gib
from penstock.platform.placement import device_load_gib, host_load_gib, plan_placement
from penstock.rollout.config import VllmEngineConfig

Check = Callable[[RunConfig], list[Finding]]


def check_colocated(config: RunConfig) -> list[Finding]:
    """Roles that take turns need one pool and on-policy data."""
    cluster, findings = config.cluster, []
    if not cluster.colocated:
        return []
    if config.dataflow.max_staleness:
        findings.append(
            Finding(
                f"cluster.colocated=true needs dataflow.max_staleness=0, not {config.dataflow.max_staleness}: trainer and "
                "engines take turns on their devices, so nothing can be generated ahead. "
                "Use dataflow=synchronous, or colocated=false.",
                ("cluster.colocated", "dataflow.max_staleness"),
            )
        )
    if cluster.trainer_pool != cluster.rollout_pool:
        findings.append(
            Finding(
                f"cluster.colocated=true needs one pool, not trainer_pool={cluster.trainer_pool} and "
                f"rollout_pool={cluster.rollout_pool}: they share devices. Name the same pool twice.",
                ("cluster.colocated", "cluster.trainer_pool", "cluster.rollout_pool"),
            )
        )
    return findings


def check_device_counts(config: RunConfig, command: Command) -> list[Finding]:
    """One process per GPU, two when colocated. CPU slots may be shared by any number of processes."""
    cluster = config.cluster
    wanted: dict[str, list[str]] = {}
    for placement in plan_placement(config, command):
        if placement.pool is not None and placement.device == "gpu":
            wanted.setdefault(placement.pool, []).append(placement.role)
    findings = []
    for pool, roles in wanted.items():
        ranks, engines = roles.count("trainer"), roles.count("engine")
        needed = max(ranks, engines) if cluster.colocated else ranks + engines
        count = cluster.pools[pool].count
        if needed > count:
            findings.append(
                Finding(
                    f"cluster.pools.{pool}.count={count} is too small for {_count_words(ranks, engines)}: each needs a GPU "
                    f"of its own, {needed} in all. Use fewer ranks or engines, or a larger pool.",
                    ("cluster", "trainer.num_ranks", "rollout.num_engines"),
                )
            )
    return findings


def check_cpu_engine(config: RunConfig) -> list[Finding]:
    """On CPU, vLLM needs a stated cache size, and flash attention does not exist."""
    engine, findings = config.rollout.engine, []
    pool = config.cluster.pools[config.cluster.rollout_pool]
    if pool.device == "gpu":
        return []
    if isinstance(engine, VllmEngineConfig) and engine.kv_cache_gib is None:
        findings.append(
            Finding(
                f"rollout.engine.kv_cache_gib is null on the CPU pool {config.cluster.rollout_pool}: there is no device "
                "memory to take a share of. Use rollout/engine=vllm_cpu, or set the size in GiB.",
                ("rollout.engine.kv_cache_gib", "cluster"),
            )
        )
    if config.model.attention == "flash_attention_2":
        findings.append(
            Finding(
                "model.attention=flash_attention_2 needs a GPU, and the pools are CPU. Use model.attention=sdpa.",
                ("model.attention", "cluster"),
            )
        )
    return findings


def check_kv_cache(config: RunConfig) -> list[Finding]:
    """The cache of one engine holds at least one trajectory of full length, else its queue never moves."""
    engine, pool = config.rollout.engine, config.cluster.pools[config.cluster.rollout_pool]
    if not isinstance(engine, VllmEngineConfig) or (pool.device == "cpu" and engine.kv_cache_gib is None):
        return []
    block = 128 if pool.device == "cpu" else 16
    tokens = ceil(config.model.max_context_tokens / block) * block
    needed = sequence_kv_gib(config) * tokens / config.model.max_context_tokens
    available = kv_cache_gib(config, pool)
    if available >= needed:
        return []
    return [
        Finding(
            f"rollout.engine: a KV cache of {_size(available)} does not hold one trajectory of "
            f"model.max_context_tokens={config.model.max_context_tokens}, {_size(needed)}: the engine could never finish it. "
            "Raise rollout.engine.kv_cache_gib (or gpu_memory_utilization), or shorten the context.",
            ("rollout.engine", "model", "cluster.pools"),
        )
    ]


def check_memory(config: RunConfig, command: Command) -> list[Finding]:
    """The estimate of every device, and of the CPU pool, is within what the pool states."""
    placements = plan_placement(config, command)
    keys = ("model", "trainer", "rollout", "cluster", "reward.num_workers")
    findings = []
    for (name, slot), load in device_load_gib(config, placements).items():
        pool = config.cluster.pools[name]
        if load > pool.memory_gib:
            findings.append(
                Finding(
                    f"cluster.pools.{name}: GPU {slot} needs about {load:.1f} GiB but has memory_gib={pool.memory_gib:g}. "
                    "Use a higher trainer.zero_stage with more ranks, gradient_checkpointing=true, offload_optimizer=true, "
                    "a smaller max_tokens_per_micro_batch or a smaller rollout.engine.kv_cache_gib.",
                    keys,
                )
            )
    cpu_pools = {p.pool for p in placements if p.pool is not None and p.device == "cpu"}
    if cpu_pools:
        available = sum(config.cluster.pools[name].memory_gib for name in cpu_pools)
        load = host_load_gib(placements)
        if load > available:
            findings.append(
                Finding(
                    f"cluster.pools: {len(placements)} processes need about {load:.1f} GiB of main memory, memory_gib allows "
                    f"{available:g}. Use fewer engines, ranks or reward workers, a smaller max_tokens_per_micro_batch, or "
                    "raise memory_gib if the machine has it.",
                    keys,
                )
            )
    return findings


def check_transport(config: RunConfig) -> list[Finding]:
    """Shared memory does not cross nodes."""
    if config.weights.transport == "object_store" or config.cluster.address == "local":
        return []
    return [
        Finding(
            f"weights.transport=shared_memory on the cluster {config.cluster.address}: it needs trainer rank 0 and every "
            "engine on one node. Use weights=object_store if they may be on several.",
            ("weights.transport", "cluster.address"),
            "warning",
        )
    ]


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * GIB / 2**20:.2f} MiB"


def _count_words(ranks: int, engines: int) -> str:
    words = [f"{count} {noun}" for count, noun in ((ranks, "trainer rank(s)"), (engines, "engine(s)")) if count]
    return " and ".join(words)


def _for(command: Command) -> tuple[Check, ...]:
    return (lambda config: check_device_counts(config, command), lambda config: check_memory(config, command))


CLUSTER_CHECKS: dict[Command, tuple[Check, ...]] = {
    "train": (check_colocated, check_cpu_engine, check_kv_cache, check_transport, *_for("train")),
    "sft": _for("sft"),
    "eval": (check_cpu_engine, check_kv_cache, *_for("eval")),
}
