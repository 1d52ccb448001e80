"""The transfers of one publish, computed from a configuration alone: bytes per link, lower bound, egress and buckets.

    python benchmarks/weights_plan.py experiment=math_qwen_8gpu rollout.engine.tensor_parallel_size=4 \\
        rollout.num_engines=1                           (10 s, no GPU and no weights; `make weights-plan ARGS="…"`)

A run plans with the layouts of its own ranks and engines. Here those are derived without either: the trainer's from
its settings, the engine's by tracing vLLM's loader on the meta device in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import POLICY
from penstock.platform.checks.load import load_config
from penstock.platform.cli.main import print_error
from penstock.platform.cluster.actor_factory import pool_device
from penstock.platform.cluster.placement import plan_placement
from penstock.platform.cluster.weight_routes import num_engine_layouts, weight_route
from penstock.platform.config.checkpoint_shapes import config_file
from penstock.platform.config.schema import RunConfig
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.trainer.backends.tensor_parallel import axis_of
from penstock.weights.hf_folder import transformers_config
from penstock.weights.layout.algebra import Box, Layout, TensorSpec, cut, subtract, volume, whole
from penstock.weights.layout.checkpoint_names import module_tensors
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.model_config import DTYPE_BYTES, DType, ModelShape
from penstock.weights.planner.plan import Plan
from penstock.weights.planner.relay import Hop, relay_tree
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


def plan_report(config: RunConfig) -> PlanReport:
    """Plan a publish.

    Raises:
        WeightSyncError: If the layout cannot be derived from vLLM's loader.
    """
    rollout, trainer, shape = config.rollout, config.trainer, config.model.shape
    hf_config = _transformers_config(config)
    tensors = tuple(module_tensors(hf_config))
    if rollout.engine.type == "torch":
        layout = TrainingSharding(tuple(tensors)).layout()
    else:  # traced from vLLM's own loader, without allocating weights
        os.environ.update(vllm_environment(pool_device(config, config.cluster.rollout_pool), threads=1))
        layout = plain_layout(hf_config, tensors, config.model.dtype, rollout.engine.tensor_parallel_size)
    engine = EngineLayout(rollout.engine.type, layout)
    started = time.perf_counter()
    num_replicas, is_fsdp2 = trainer.num_ranks // trainer.tensor_parallel_size, trainer.backend == "fsdp2"
    training = TrainingSharding(
        tensors,
        num_replicas,
        is_fsdp2 or trainer.zero_stage == 3,
        trainer.tensor_parallel_size,
        expected_splits(tensors, trainer.tensor_parallel_size, shape.num_kv_heads),
        by_rows=is_fsdp2,
        num_copies=trainer.fsdp_copies,
    )
    dtype, item_bytes = config.model.dtype, DTYPE_BYTES[config.model.dtype]
    training_at, engines_at = _devices(config)
    plans = [ShardTransfer.between(training, engine, dtype, None, training_at, at).plan for at in engines_at]
    source = training.layout()
    hops = relay_tree(["this node"] * (config.num_engines - len(plans) + 1))
    planning_s = time.perf_counter() - started
    sent = sum((Counter(egress(plan)) for plan in plans), Counter[int]())
    wire = sum(map(wire_bytes, plans))
    needed_bytes = sum(copy.num_elements for plan in plans for copy in plan.copies) * item_bytes
    model_bytes = shape.num_parameters * item_bytes
    return PlanReport(
        model_bytes=model_bytes,
        num_planned_engines=len(plans),
        wire_bytes=wire,
        local_bytes=needed_bytes - wire,
        lower_bound_bytes=sum(lower_bound_bytes(source, engine.layout, item_bytes, plan.resident) for plan in plans),
        max_egress_bytes=max(sent.values(), default=0),
        relayed_bytes=len(hops) * sum(sum(sizes.values()) for sizes in engine.layout.buffers) * item_bytes,
        gathered_bytes=model_bytes * engine.tp_size * config.num_engines,
        num_copies=sum(1 for plan in plans for _ in plan.copies),
        num_buckets=sum(len(plan.buckets) for plan in plans),
        bucket_bytes=plans[0].bucket_bytes,
        relay_depth=relay_depth(hops),
        planning_s=planning_s,
        links=sorted((src, dst, num_bytes) for (src, dst), num_bytes in bytes_per_link(plans[0]).items()),
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


def bytes_per_link(plan: Plan) -> Mapping[tuple[int, int], int]:
    """`(source rank, destination rank)` -> bytes over the wire."""
    links: Counter[tuple[int, int]] = Counter()
    for copy in plan.copies:
        if plan.resident.get(copy.dst_rank) != copy.src_rank:  # it does not stay on one device
            links[copy.src_rank, copy.dst_rank] += copy.num_elements * plan.item_bytes
    return links


def wire_bytes(plan: Plan) -> int:
    """Bytes over all links."""
    return sum(bytes_per_link(plan).values())


def egress(plan: Plan) -> Mapping[int, int]:
    """Bytes that each source rank sends."""
    sent: Counter[int] = Counter()
    for (src_rank, _), num_bytes in bytes_per_link(plan).items():
        sent[src_rank] += num_bytes
    return sent


def lower_bound_bytes(
    source: Layout, destination: Layout, item_bytes: int, resident: Mapping[int, int] | None = None
) -> int:
    """Σ |needed − owned| · size: the bytes that any plan must move between devices."""
    resident = resident or {}
    total = 0
    for tensor, wanted in destination.shards.items():
        for shard in wanted:
            here = [owned.box for owned in source.shards[tensor] if owned.rank == resident.get(shard.rank)]
            missing = [shard.box]
            for box in here:
                missing = [rest for part in missing for rest in subtract(part, box)]
            total += sum(map(volume, missing)) * item_bytes
    return total


def relay_depth(hops: Sequence[Hop]) -> int:
    """Longest chain of hops from the first replica to the last."""
    level = {0: 0}
    for hop in hops:
        level[hop.child] = level[hop.parent] + 1
    return max(level.values())


def expected_splits(tensors: Iterable[TensorSpec], size: int, num_kv_heads: int) -> dict[str, tuple[Box, ...]]:
    """The splits that AutoTP will make, computed without it: attention in whole key/value heads, else equal parts."""
    splits: dict[str, tuple[Box, ...]] = {}
    for name, shape in tensors:
        axis = axis_of(name)
        if axis is not None:
            units = num_kv_heads if ".self_attn." in name else shape[axis]
            counts = [units // size + (rank < units % size) for rank in range(size)]
            widths = [count * (shape[axis] // units) for count in counts]
            ends = accumulate(widths)
            splits[name] = tuple(
                cut(whole(shape), axis, end - width, end) for end, width in zip(ends, widths, strict=True)
            )
    return splits


def config_of_shape(shape: ModelShape) -> Any:
    """A transformers configuration for a model of which only the shape is known: of the family that has this shape."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    experts = {
        "num_experts": shape.num_experts,
        "moe_intermediate_size": shape.expert_size,
        "shared_expert_intermediate_size": shape.shared_expert_size,
        "num_experts_per_tok": min(8, shape.num_experts),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if shape.num_experts:
        model_type = "qwen2_moe" if shape.shared_expert_size else "qwen3_moe"
    else:
        model_type = "qwen2" if shape.attention_bias else "qwen3" if shape.qk_norm else "llama"
    return AutoConfig.for_model(
        model_type,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tie_word_embeddings,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        **(experts if shape.num_experts else {}),
    )


def plain_layout(
    hf_config: Any, tensors: Sequence[TensorSpec], dtype: DType, tp_size: int, max_model_len: int = 32
) -> Layout:
    """The layout of an engine that is not running, all ranks in this process. Nothing is loaded.

    Args:
        hf_config: Configuration of the model in transformers.
        tensors: As for `trace_rank`.
        dtype: Dtype of the engine and of the published tensors.
        tp_size: Tensor-parallel ranks.
        max_model_len: Longest sequence, tokens.

    Raises:
        WeightSyncError: As `trace_rank` and `joined`.
    """
    from penstock.rollout.engines.vllm.layout import joined, plain_config, stand_in_groups, trace_rank

    ranks = []
    for rank in range(tp_size):
        with stand_in_groups(rank, tp_size):
            ranks.append(trace_rank(plain_config(hf_config, dtype, tp_size, max_model_len), tensors, dtype, rank))
    return joined(ranks)


def _print(config: RunConfig, report: PlanReport, console: Console) -> None:
    trainer, engine = config.trainer, config.rollout.engine
    split = f", tensor parallel {trainer.tensor_parallel_size}" if trainer.tensor_parallel_size > 1 else ""
    console.print(
        f"one publish: {trainer.num_ranks} training ranks ({trainer.backend}, {trainer.sharding}{split}) → "
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


def main() -> int:
    """Parse the command line and print the plan; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="As of penstock train.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    arguments = parser.parse_intermixed_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    try:
        config = load_config("train", arguments.overrides, dry_run=True).config
        report = plan_report(config)
    except PenstockError as error:
        print_error(error)
        return 1
    if arguments.json:
        print(json.dumps(asdict(report)))
    else:
        _print(config, report, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
