"""Cross-field checks of roles against pools: devices, slots, estimated memory, and the transfer of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from math import ceil

from penstock.dataflow.ids import POLICY
from penstock.platform.cluster.memory import GIB, kv_cache_gib, round_up, sequence_kv_gib
from penstock.platform.cluster.placement import device_load_gib, host_load_gib, plan_placement
from penstock.platform.cluster.weight_routes import (
    GROUP_ROUTES,
    MULTI_LAYOUT_ROUTES,
    num_engine_layouts,
    weight_route,
)
from penstock.platform.config.findings import WITHOUT_ENGINES, Command, Finding, Fit, error, warning
from penstock.platform.config.schema import FROZEN_ROLES, RunConfig
from penstock.rollout.config import TorchEngineConfig, VllmEngineConfig

_MEMORY_KEYS = ("model", "trainer", "rollout", "cluster", "reward.num_workers")
MEMORY_SETTINGS = (
    "trainer.max_tokens_per_micro_batch",
    "model.max_context_tokens",
    "rollout.engine.kv_cache_gib",
    "rollout.num_engines",
    "trainer.num_ranks",
    "reward.num_workers",
)
"""Keys that decide how much memory a run takes. Advice names those that somebody has set."""


def check_cluster(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Run the checks of roles against pools that apply to `command`. The pools must exist."""
    too_few = list(check_device_counts(config, command))
    yield from too_few or check_memory(config, command)
    if command not in WITHOUT_ENGINES:
        for check in (check_engine_device, check_cpu_engines, check_kv_cache, check_tensor_parallel):
            yield from of_each_rollout_pool(config, check)
        yield from check_nodes(config, command)
        yield from check_rollout_pools(config)
    if command == "train":
        yield from check_colocated(config)
        yield from check_offload(config)
        yield from check_weights(config)


def of_each_rollout_pool(config: RunConfig, check: Callable[[RunConfig], Iterator[Finding]]) -> Iterator[Finding]:
    """Run a check of the engines on each pool; what it says of an extra pool names the keys of that pool."""
    yield from check(config)
    for name, extra in config.cluster.extra_rollout_pools.items():
        (view,) = (view for view in config.rollout_views if view.cluster.rollout_pool == name)
        of_pool = f"cluster.extra_rollout_pools.{name}."
        for finding in check(view):
            message = finding.message.replace("rollout.num_engines", f"{of_pool}num_engines")
            if extra.engine is not None:
                message = message.replace("rollout.engine.", f"{of_pool}engine.")
            # The keys of an extra pool are the user's.
            yield replace(finding, message=message, other_keys=(*finding.other_keys, of_pool.rstrip(".")), fits=())


def check_rollout_pools(config: RunConfig) -> Iterator[Finding]:
    """Check that the extra rollout pools can be used together with the rest of the run."""
    cluster, extra = config.cluster, config.cluster.extra_rollout_pools
    if not extra:
        return
    names = ", ".join(extra)
    if cluster.rollout_pool in extra:
        yield error(
            f"cluster.extra_rollout_pools.{cluster.rollout_pool} is cluster.rollout_pool, too: its engines are those "
            "of rollout.num_engines. Raise that, and name other pools here."
        )
    if cluster.colocated:
        yield error(
            f"cluster.extra_rollout_pools={names} with cluster.colocated=true: the engines of {cluster.rollout_pool} "
            "sleep while the trainer computes, and nothing is generated then, so the other pools would stand idle. Use "
            "cluster.colocated=false."
        )
    if config.partner is not None:
        yield error(
            f"cluster.extra_rollout_pools={names} with a partner: its engines would be on these pools as well, which "
            "is not supported. Leave partner or extra_rollout_pools out.",
            "partner",
        )
    kinds = {name: cluster.pools[name].device for name in (cluster.rollout_pool, *extra)}
    if len(set(kinds.values())) > 1:
        yield error(
            f"cluster.extra_rollout_pools={names}: the engines of a run are all on GPUs or all on CPUs, but "
            f"{' and '.join(f'{name} is a {device} pool' for name, device in kinds.items())}: weights are sent to both "
            "kinds in different ways. Use pools of one kind."
        )


def check_nodes(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check that what exchanges data in every layer is on one node, where the pool says how many devices a node has.

    These are the devices of an engine, and those of the ranks that split a model or a sequence.
    """
    tp, sp = config.trainer.tensor_parallel_size, config.trainer.sequence_parallel_size
    for placement in plan_placement(config, command):
        pool = config.cluster.pools.get(placement.pool or "")
        begins_group = placement.role == "trainer" and placement.policy_id == POLICY and not placement.index % (tp * sp)
        num_slots = tp * sp if begins_group else placement.num_slots
        if pool is None or pool.devices_per_node is None or num_slots == 1:
            continue
        last = placement.slot + num_slots - 1
        if placement.slot // pool.devices_per_node == last // pool.devices_per_node:
            continue
        if begins_group:
            key = "trainer.tensor_parallel_size" if tp > 1 else "trainer.sequence_parallel_size"
            what = f"ranks {placement.index} to {placement.index + num_slots - 1}, one group by {key}={num_slots},"
        else:
            key, what = "tensor_parallel_size", f"engine {placement.index}, tensor-parallel over {num_slots},"
        yield error(
            f"cluster.pools.{placement.pool}.devices_per_node={pool.devices_per_node}: {what} would have the devices "
            f"{placement.slot} to {last}, which are on several nodes: they exchange data in every layer, so they are "
            f"never spread over nodes. Use a {key} that divides devices_per_node.",
            "cluster",
            "trainer" if begins_group else "rollout.engine",
        )
        return


def check_pools(config: RunConfig) -> Iterator[Finding]:
    """Check that all pools that roles name exist. The other checks require this."""
    cluster, pools = config.cluster, list(config.cluster.pools)
    roles = [("cluster.trainer_pool", cluster.trainer_pool), ("cluster.rollout_pool", cluster.rollout_pool)]
    roles += [(f"{role}.pool", pool) for role in FROZEN_ROLES if (pool := config.frozen(role).pool) is not None]
    roles += [(f"cluster.extra_rollout_pools.{name}", name) for name in cluster.extra_rollout_pools]
    roles += [] if config.reward.pool is None else [("reward.pool", config.reward.pool)]
    for key, name in roles:
        if name not in pools:
            close = get_close_matches(name, pools, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            yield error(f"{key}={name} is not a pool.{hint} Pools: {', '.join(pools) or 'none'}.", "cluster.pools")


def check_colocated(config: RunConfig) -> Iterator[Finding]:
    """Check that colocated roles share one pool and train on-policy data."""
    cluster = config.cluster
    if not cluster.colocated:
        return
    if config.dataflow.max_staleness:
        yield error(
            f"cluster.colocated=true needs dataflow.max_staleness=0, not {config.dataflow.max_staleness}: trainer "
            "and engines take turns on their devices, so nothing can be generated ahead and the run would wait "
            "forever. Use dataflow=synchronous, or cluster.colocated=false.",
            fits=[Fit("dataflow.max_staleness", 0, "colocated trainer and engines take turns")],
        )
    asked_by = {
        "reference": ("algorithm.kl.coefficient", f"{config.algorithm.kl.coefficient:g}"),
        "teacher": ("algorithm.loss", config.algorithm.loss.name),
    }
    for role in FROZEN_ROLES:
        name, (key, value) = config.frozen_pool(role), asked_by[role]
        if config.takes_turns(role):
            continue
        if config.num_frozen(role) and name == cluster.trainer_pool and cluster.pools[name].device == "gpu":
            yield error(
                f"cluster.colocated=true with {key}={value}: trainer and engines fill the GPUs of {name} in turns, but "
                f"the {role} runs at the same time. Give it its own pool ({role}.pool; a CPU pool suffices for small "
                f"policies), or turns on the same GPUs ({role}.offload=true)."
            )
    if (pool := config.reward.pool) == cluster.trainer_pool and cluster.pools[pool].device == "gpu":
        yield error(
            f"cluster.colocated=true with reward.pool={pool}: trainer and engines fill the GPUs of {pool} in turns, "
            "but reward workers run at the same time. Give them their own pool, a CPU pool, or reward.pool=null."
        )
    if cluster.trainer_pool != cluster.rollout_pool:
        yield error(
            f"cluster.colocated=true needs one pool, not trainer_pool={cluster.trainer_pool} and "
            f"rollout_pool={cluster.rollout_pool}: they share devices. Name the same pool twice."
        )


def check_offload(config: RunConfig) -> Iterator[Finding]:
    """Warn of frozen policies that are told to leave the trainer's GPUs between uses and are not on them."""
    for role in FROZEN_ROLES:
        if not config.frozen(role).offload or config.takes_turns(role):
            continue
        pool = config.frozen_pool(role)
        if not config.num_frozen(role):
            why = f"this run starts no process for a {role}"
        elif config.cluster.pools[pool].device == "cpu":
            why = f"the pool {pool} has no GPUs, so its weights are in main memory anyway"
        else:
            why = f"each of its workers has a GPU of the pool {pool} to itself, which would stay unused"
        yield warning(
            f"{role}.offload=true has no effect: {why}. It is for cluster.colocated=true without {role}.pool. "
            f"Leave {role}.offload at false.",
            role,
        )


def check_device_counts(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check that each GPU gets one process, or two when colocated. Any number of processes may share a CPU slot."""
    cluster = config.cluster
    roles: dict[str, Counter[str]] = {}
    for placement in plan_placement(config, command):
        if placement.pool is not None and placement.device == "gpu":
            roles.setdefault(placement.pool, Counter())[placement.role] += placement.num_slots
    for pool, counts in roles.items():
        is_shared = cluster.colocated and command == "train" and pool == cluster.trainer_pool
        needed = max(counts.values()) if is_shared else counts.total()
        count = cluster.pools[pool].count
        if needed > count:
            words = " and ".join(f"{number} for {_named(role)}" for role, number in counts.items())
            yield error(
                f"cluster.pools.{pool}.count={count} is too small: the roles need {words}, {needed} GPUs in all. "
                "Use fewer ranks, engines or reward workers, a smaller rollout.engine.tensor_parallel_size, or a "
                "larger pool.",
                "cluster",
                "trainer.num_ranks",
                "rollout.num_engines",
                "rollout.engine",
                "reward.num_workers",
                "reward.pool",
            )


def check_engine_device(config: RunConfig) -> Iterator[Finding]:
    """Check that deterministic decoding is on CPUs."""
    name, engine = config.cluster.rollout_pool, config.rollout.engine
    is_gpu = config.cluster.pools[name].device == "gpu"
    if is_gpu and isinstance(engine, TorchEngineConfig) and engine.deterministic:
        yield error(
            f"rollout.engine.deterministic=true needs a CPU, but {name} is a GPU pool: with fixed shapes sums are "
            "repeatable on CPUs, while GPU kernels may add in a different order. Use deterministic=false, or "
            "cluster=local_cpu.",
            "rollout.engine",
        )


def check_cpu_engines(config: RunConfig) -> Iterator[Finding]:
    """Check that a CPU pool has a slot for each rank of an engine, and warn of engines that share slots."""
    name, rollout = config.cluster.rollout_pool, config.rollout
    pool, tp_size = config.cluster.pools[name], rollout.engine.tensor_parallel_size
    if pool.device == "cpu" and tp_size > pool.count:
        yield error(
            f"rollout.engine.tensor_parallel_size={tp_size} is above cluster.pools.{name}.count={pool.count}: the "
            "ranks of an engine compute at the same time and wait for the slowest, so each needs a CPU slot of its "
            f"own. Use at most {pool.count}, or a larger pool.",
            "rollout.engine",
            "cluster.pools",
        )
    elif pool.device == "cpu" and rollout.num_engines * tp_size > pool.count:
        yield warning(
            f"rollout.num_engines={rollout.num_engines} with cluster.pools.{name}.count={pool.count}: "
            f"{rollout.num_engines * tp_size} engine processes share {pool.count} CPU slots, so they slow one another "
            "down. Use fewer engines, or a larger pool.",
            "rollout.engine",
            "cluster.pools",
        )


def check_kv_cache(config: RunConfig) -> Iterator[Finding]:
    """Check that the KV cache of an engine holds a trajectory of full length; otherwise its queue would block."""
    engine, pool = config.rollout.engine, config.cluster.pools[config.cluster.rollout_pool]
    context = config.model.max_context_tokens
    if not isinstance(engine, VllmEngineConfig):
        return
    block = engine.block_tokens(pool.device)
    needed = sequence_kv_gib(config) * ceil(context / block) * block / context
    of_device, tp_size = kv_cache_gib(config, pool), engine.tensor_parallel_size
    if of_device * tp_size >= needed:
        return
    holds = int(context * of_device * tp_size / needed) // block * block
    shorter = Fit(
        "model.max_context_tokens", holds, f"the KV cache of an engine, {_size(of_device * tp_size)}, holds it"
    )
    if engine.cache_gib(pool.device) is None:  # what the weights leave of the device
        keys = [
            key for key in ("rollout.engine.gpu_memory_utilization", "model.max_context_tokens") if config.is_typed(key)
        ]
        yield error(
            f"memory: a GPU of the pool {config.cluster.rollout_pool} has {pool.limit_gib:g} GiB, of which the weights "
            f"and activations of an engine leave {_size(of_device)} for its KV cache, and one trajectory of {context} "
            f"tokens takes {_size(needed / tp_size)} there: the engine could never finish it. Use larger GPUs, more of "
            f"them for each engine, or a smaller model{or_change(keys)}.",
            "rollout.engine",
            "model",
            "cluster.pools",
            fits=[shorter] if holds > config.rollout.sampling.max_new_tokens else (),
        )
        return
    yield error(
        f"rollout.engine.kv_cache_gib: the KV cache of an engine, {_size(of_device * tp_size)}, does not hold one "
        f"trajectory of model.max_context_tokens={context}, {_size(needed)}: the engine could never finish it. Raise "
        "kv_cache_gib, or shorten the context.",
        "rollout.engine",
        "model",
        "cluster.pools",
        fits=[
            Fit(
                "rollout.engine.kv_cache_gib", round_up(needed / tp_size), f"it holds a trajectory of {context} tokens"
            ),
            *([shorter] if holds > config.rollout.sampling.max_new_tokens else ()),
        ],
    )


def check_memory(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check the estimated memory of every device and of the CPU pools against the memory of their pool."""
    placements = plan_placement(config, command)
    for name, load in device_load_gib(config, placements).items():
        key, limit = f"cluster.pools.{name}.memory_gib", config.cluster.pools[name].limit_gib
        if load > limit:
            where = (
                f"{key}={limit:g}" if config.is_typed(key) else f"memory: a GPU of the pool {name} has {limit:g} GiB"
            )
            if {one.role for one in placements if one.pool == name} == {"engine"}:
                remedy = "larger GPUs, or several for each engine (its tensor_parallel_size)"
            elif config.trainer.backend == "fsdp2":
                remedy = (
                    "larger or more GPUs, more ranks, gradient_checkpointing=true, offload_parameters=true with "
                    "offload_optimizer=true, or trainer.lora={}"
                )
            else:
                remedy = (
                    "larger or more GPUs, ZeRO with more ranks (zero_stage), gradient_checkpointing=true, "
                    "offload_optimizer=true or trainer=lora"
                )
            yield error(
                f"{where}, but its fullest GPU needs about {load:.1f} GiB. Use {remedy}"
                f"{or_change([key for key in MEMORY_SETTINGS if config.is_typed(key)])}.",
                *_MEMORY_KEYS,
                fits=smaller_micro_batch(config, partial(_device_load_gib, command, name), limit),
            )
    cpu_pools = sorted({p.pool for p in placements if p.pool is not None and p.device == "cpu"})
    load, allowed = host_load_gib(placements), sum(config.cluster.pools[name].limit_gib for name in cpu_pools)
    if cpu_pools and load > allowed:
        yield error(
            f"cluster.pools.{cpu_pools[0]}.memory_gib={allowed:g}, but {len(placements)} processes need about "
            f"{load:.1f} GiB of main memory. Raise memory_gib if the machine has it"
            f"{or_change([key for key in MEMORY_SETTINGS if config.is_typed(key)])}.",
            *_MEMORY_KEYS,
            fits=smaller_micro_batch(config, lambda one: host_load_gib(plan_placement(one, command)), allowed),
        )


def _device_load_gib(command: Command, pool: str, config: RunConfig) -> float:
    return device_load_gib(config, plan_placement(config, command))[pool]


def smaller_micro_batch(config: RunConfig, load_gib: Callable[[RunConfig], float], limit_gib: float) -> list[Fit]:
    """The largest micro-batch, by halves, with which a run fits into memory; empty if there is none.

    Args:
        config: A run that does not fit.
        load_gib: What a run takes, GiB.
        limit_gib: What there is, GiB.
    """
    key, trainer = "trainer.max_tokens_per_micro_batch", config.trainer
    tokens, least = (
        trainer.max_tokens_per_micro_batch,
        -(-config.model.max_context_tokens // trainer.sequence_parallel_size),
    )
    while tokens > least:
        tokens = max(least, tokens // 2)
        smaller = trainer.model_copy(update={"max_tokens_per_micro_batch": tokens})
        if load_gib(config.model_copy(update={"trainer": smaller})) <= limit_gib:
            return [Fit(key, tokens, f"the run fits into {limit_gib:.1f} GiB of memory with it")]
    return []


def or_change(keys: Sequence[str]) -> str:
    """Advice to change the values that somebody has set."""
    return f", or change {' or '.join(keys)}" if keys else ""


def check_tensor_parallel(config: RunConfig) -> Iterator[Finding]:
    """Check that the model can be split over the devices of an engine."""
    tp_size = config.rollout.engine.tensor_parallel_size
    if tp_size == 1:
        return
    uneven = config.model.shape.uneven_sizes(tp_size)
    if uneven:
        yield error(
            f"rollout.engine.tensor_parallel_size={tp_size} does not divide {' and '.join(uneven)} of model.shape: "
            "vLLM cannot split the model evenly. Use a number of devices that divides them.",
            "rollout.engine",
        )


def check_weights(config: RunConfig) -> Iterator[Finding]:
    """Check the weight transfer and the update mode of the engines."""
    weights, cluster = config.weights, config.cluster
    tp_size = max(view.rollout.engine.tensor_parallel_size for view in config.rollout_views)
    route, mode = weight_route(config), weights.update_mode
    devices = {cluster.pools[pool].device for pool in (cluster.trainer_pool, cluster.rollout_pool)}
    drains, streams = mode in ("drain", "multi_version"), weights.staging == "bucket"
    if drains and cluster.colocated:
        yield error(
            f"weights.update_mode={mode} with cluster.colocated=true: the engines sleep while the trainer computes, so "
            "there are no requests to drain at a publish, and no engine may serve during it. Use "
            "weights.update_mode=keep_kv."
        )
    if mode == "multi_version" and config.num_engines < 2:
        yield error(
            f"weights.update_mode=multi_version with rollout.num_engines={config.num_engines}: the other "
            "engines serve while one is updated, but there are no others. Use 2 or more engines, or "
            "weights.update_mode=drain."
        )
    if weights.overlap and drains:
        yield error(
            f"weights.overlap=true with weights.update_mode={mode}: new requests wait until the first engine has the "
            "version, which takes until its running requests have ended, so its slots would be empty. Use "
            "keep_kv or recompute_kv."
        )
    if weights.overlap and cluster.colocated:
        yield error(
            "weights.overlap=true with cluster.colocated=true: the engines sleep while the trainer computes. Use "
            "weights.overlap=false."
        )
    if weights.overlap and streams:
        yield error(
            "weights.staging=bucket with weights.overlap=true: engines are paused during the transfer, and the trainer "
            "would already change the weights. Use weights.staging=shard, or weights.overlap=false."
        )
    if weights.codec != "full" and streams:
        yield error(
            f"weights.staging=bucket with weights.codec={weights.codec}: a delta needs the previous version, which an "
            "interrupted stream has overwritten. Use weights.staging=shard, or weights.codec=full."
        )
    if mode == "multi_version" and route == "live_parameters":
        yield error(
            "weights.staging=bucket with weights.update_mode=multi_version: a process group sends a version to all "
            "engines at once, so none could serve during it. Use weights.staging=shard, or another "
            "weights.update_mode."
        )
    if weights.transport == "cuda_ipc" and streams:
        yield error(
            "weights.transport=cuda_ipc with weights.staging=bucket: its buffers always hold a full shard. Use "
            "weights.staging=shard, or weights.transport=auto."
        )
    if weights.transport == "cuda_ipc" and len(devices) > 1:
        yield error(
            f"weights.transport=cuda_ipc with cluster.trainer_pool={cluster.trainer_pool}: trainer and engines are on "
            "pools of different devices. Use weights.transport=auto.",
            "cluster",
        )
    if num_engine_layouts(config) > 1 and route not in (*MULTI_LAYOUT_ROUTES, "gather"):
        engines = " and ".join(
            f"{view.rollout.engine.type} over {view.rollout.engine.tensor_parallel_size} on {view.cluster.rollout_pool}"
            for view in config.rollout_views
        )
        remedy = "weights.transport=auto"
        if route == "adapters":
            remedy = "weights.transport=shared_memory on one node or process_group on several, which send whole weights"
        yield error(
            f"weights.transport={weights.transport} with cluster.extra_rollout_pools of other layouts ({engines}): the "
            f"route {route} sends one layout to all engines. Use {remedy}, or equal engines.",
            "rollout.engine",
            "trainer.lora",
        )
    if weights.codec == "int8_delta" and tp_size > 1:
        yield error(
            f"weights.codec=int8_delta with rollout.engine.tensor_parallel_size={tp_size}: it rounds separately for "
            "each device, so parameters that all devices hold would differ between them. Use delta."
        )
    if weights.transport == "gather" and tp_size > 1:
        yield error(
            f"weights.transport=gather with rollout.engine.tensor_parallel_size={tp_size}: checksums of whole tensors "
            "cannot be compared with those of the ranks' shards. Use weights.transport=auto."
        )
    if weights.codec != "full" and route not in GROUP_ROUTES:
        yield warning(
            f"weights.codec={weights.codec} has no effect with weights.transport={weights.transport} and "
            f"cluster.address={cluster.address}: only a process group uses it, but the route is {route}."
        )


def _named(role: str) -> str:
    return "reward workers" if role == "reward" else f"{role}s"


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * GIB / 2**20:.2f} MiB"
