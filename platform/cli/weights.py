"""`penstock weights plan`: the transfers of a publish, computed from the configuration alone."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.dataflow.ids import POLICY
from penstock.platform.cluster.actor_factory import pool_device
from penstock.platform.cluster.placement import plan_placement
from penstock.platform.cluster.weight_routes import num_engine_layouts, weight_route
from penstock.platform.config.checkpoint_shapes import config_file
from penstock.platform.config.schema import RunConfig
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.trainer.backends.tensor_parallel import expected_splits
from penstock.weights.hf_folder import transformers_config
from penstock.weights.layout.checkpoint import config_of_shape, module_tensors
from penstock.weights.layout.engine import EngineLayout, TrainingSharding
from penstock.weights.layout.training import training_layout
from penstock.weights.model_config import DTYPE_BYTES
from penstock.weights.planner.plan import lower_bound_bytes
from penstock.weights.planner.relay import depth, relay_tree
from penstock.weights.transport.shards import ShardTransfer

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Transfer volumes of a plan, in bytes.

    Attributes:
        num_planned_engines: Engines that the training ranks write to: the first one, or all if the route is device
            memory. The bytes sent are summed over them.
        local_bytes: Bytes that need no transfer because a training rank holds them on the same device.
        links: `(training rank, engine rank, bytes)` for the first engine.
        relayed_bytes: Bytes that engines forward to other engines.
        gathered_bytes: Bytes that gathering on rank 0 and sending whole tensors to every engine rank would send.
    """

    model_bytes: int
    num_planned_engines: int
    wire_bytes: int
    local_bytes: int
    lower_bound_bytes: int
    max_egress_bytes: int
    relayed_bytes: int
    gathered_bytes: int
    num_copies: int
    num_buckets: int
    bucket_bytes: int
    relay_depth: int
    planning_s: float
    links: list[tuple[int, int, int]]


def run_weights_plan(config: RunConfig, *, as_json: bool) -> int:
    """Print the transfer plan of `config`; returns the exit code."""
    report = plan_report(config)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        _print(config, report, Console())
    return 0


def plan_report(config: RunConfig) -> PlanReport:
    """Plan a publish.

    Raises:
        WeightSyncError: If the layout cannot be derived from vLLM's loader.
    """
    rollout, trainer, shape = config.rollout, config.trainer, config.model.shape
    hf_config = _transformers_config(config)
    tensors = tuple(module_tensors(hf_config))
    if rollout.engine.type == "torch":
        layout = training_layout(tensors)
    else:  # traced from vLLM's own loader, without allocating weights
        os.environ.update(vllm_environment(pool_device(config, config.cluster.rollout_pool), threads=1))
        from penstock.rollout.engines.vllm.layout import plain_layout

        layout = plain_layout(hf_config, tensors, config.model.dtype, rollout.engine.tensor_parallel_size)
    engine = EngineLayout(rollout.engine.type, layout)
    started = time.perf_counter()
    num_replicas = trainer.num_ranks // trainer.tensor_parallel_size
    training = TrainingSharding(
        tensors,
        num_replicas,
        trainer.zero_stage == 3,
        trainer.tensor_parallel_size,
        expected_splits(tensors, trainer.tensor_parallel_size, shape.num_kv_heads),
    )
    dtype, item_bytes = config.model.dtype, DTYPE_BYTES[config.model.dtype]
    training_at, engines_at = _devices(config)
    plans = [ShardTransfer.between(training, engine, dtype, None, training_at, at).plan for at in engines_at]
    source = training.layout()
    hops = relay_tree(["this node"] * (config.num_engines - len(plans) + 1))
    planning_s = time.perf_counter() - started
    egress = sum((Counter(plan.egress) for plan in plans), Counter[int]())
    wire_bytes = sum(plan.wire_bytes for plan in plans)
    needed_bytes = sum(copy.num_elements for plan in plans for copy in plan.copies) * item_bytes
    model_bytes = shape.num_parameters * item_bytes
    return PlanReport(
        model_bytes=model_bytes,
        num_planned_engines=len(plans),
        wire_bytes=wire_bytes,
        local_bytes=needed_bytes - wire_bytes,
        lower_bound_bytes=sum(lower_bound_bytes(source, engine.layout, item_bytes, plan.resident) for plan in plans),
        max_egress_bytes=max(egress.values(), default=0),
        relayed_bytes=len(hops) * sum(sum(sizes.values()) for sizes in engine.layout.buffers) * item_bytes,
        gathered_bytes=model_bytes * engine.tp_size * config.num_engines,
        num_copies=sum(1 for plan in plans for _ in plan.copies),
        num_buckets=sum(len(plan.buckets) for plan in plans),
        bucket_bytes=plans[0].bucket_bytes,
        relay_depth=depth(hops),
        planning_s=planning_s,
        links=sorted((src, dst, num_bytes) for (src, dst), num_bytes in plans[0].bytes_per_link.items()),
    )


def _transformers_config(config: RunConfig) -> Any:
    """The policy's transformers configuration: its config.json, or one of the shape of a policy still to be made."""
    file = None if config.model.path is None else config_file(config.model.path)
    return config_of_shape(config.model.shape) if file is None else transformers_config(file)


def _devices(config: RunConfig) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Devices of the training ranks, and of the ranks of each engine that the training ranks write to directly.

    With shared memory or a process group this is only the first engine, and no data is already in place. With CUDA IPC
    it is every engine, and data that a training rank holds on the same device need not be sent.
    """
    if weight_route(config) != "cuda_ipc":
        return (), [()]
    at: dict[str, list[tuple[str, ...]]] = {"trainer": [], "engine": []}
    for one in plan_placement(config):
        if one.role in at and one.policy_id == POLICY and one.device == "gpu":
            at[one.role].append(tuple(f"{one.pool}:{slot}" for slot in range(one.slot, one.slot + one.num_slots)))
    return tuple(at_one[0] for at_one in at["trainer"]), at["engine"] or [()] * config.num_engines


def _print(config: RunConfig, report: PlanReport, console: Console) -> None:
    trainer, engine = config.trainer, config.rollout.engine
    split = f", tensor parallel {trainer.tensor_parallel_size}" if trainer.tensor_parallel_size > 1 else ""
    console.print(
        f"one publish: {trainer.num_ranks} training ranks ({trainer.backend}, ZeRO-{trainer.zero_stage}{split}) → "
        f"{config.num_engines} {engine.type} engines over {engine.tensor_parallel_size} devices each, "
        f"{config.model.dtype}"
    )
    table = Table(title="to the first engine, MiB", title_justify="left")
    table.add_column("from training rank")
    destinations = sorted({dst for _, dst, _ in report.links})
    for dst in destinations:
        table.add_column(f"to its rank {dst}", justify="right")
    for src in sorted({src for src, _, _ in report.links}):
        carried: dict[int, Any] = {dst: num_bytes for one, dst, num_bytes in report.links if one == src}
        table.add_row(str(src), *(f"{carried.get(dst, 0) / MIB:,.1f}" for dst in destinations))
    console.print(table)
    relayed = f"{report.relayed_bytes / MIB:,.1f} MiB, at most {report.relay_depth} hop(s) from the first"
    for name, value in {
        "model": f"{report.model_bytes / MIB:,.1f} MiB",
        "sent by training ranks": f"{report.wire_bytes / MIB:,.1f} MiB",
        "stays on its device": f"{report.local_bytes / MIB:,.1f} MiB",
        "lower bound (missing on engine ranks)": f"{report.lower_bound_bytes / MIB:,.1f} MiB",
        "busiest training rank sends": f"{report.max_egress_bytes / MIB:,.1f} MiB",
        "forwarded between engines": relayed,
        "gather and broadcast would send": f"{report.gathered_bytes / MIB:,.1f} MiB",
        "copies": f"{report.num_copies:,} in {report.num_buckets:,} buckets of {report.bucket_bytes // MIB} MiB",
        "planned in": f"{report.planning_s:.2f} s",
    }.items():
        console.print(f"  {name:<36}{value}")
    if num_engine_layouts(config) > 1:
        console.print("  Engines of cluster.extra_rollout_pools have other layouts: this plan is not theirs.")
    if weight_route(config) == "gather":
        console.print("  weights.transport=gather: this plan is not used, because whole tensors go through rank 0.")
    elif weight_route(config) == "adapters":
        console.print("  trainer.lora: this plan is not used, because only adapters are sent (weights.transport=auto).")
    elif report.num_planned_engines > 1:
        console.print(f"  The training ranks write to the devices of all {report.num_planned_engines} engines.")
    elif report.relayed_bytes and weight_route(config) == "shared_memory":
        console.print("  On one node engines map the same shared memory, so nothing is forwarded.")
