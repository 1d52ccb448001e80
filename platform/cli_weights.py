"""`penstock weights plan`: what a publish would send from where to where, computed from the configuration alone."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.platform.config.schema import RunConfig
from penstock.weights.layout.algebra import Layout
from penstock.weights.layout.decoder import decoder_tensors
from penstock.weights.layout.engine import EngineSide, TrainingSide
from penstock.weights.model_config import DTYPE_BYTES
from penstock.weights.planner.plan import Plan, lower_bound_bytes, make_plan
from penstock.weights.planner.relay import Hop, depth, relay_tree

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Figures of a plan, bytes.

    Attributes:
        links: `(training rank, engine rank)` and what it carries, for the first engine.
        relayed_bytes: What engines pass on to engines.
        gathered_bytes: What gathering on rank 0 and sending whole tensors to every engine rank would send.
    """

    model_bytes: int
    wire_bytes: int
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
    """Print the plan of `config`; returns the exit code."""
    report = plan_report(config)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        _print(config, report, Console())
    return 0


def plan_report(config: RunConfig) -> PlanReport:
    """Plan a publish.

    Raises:
        WeightSyncError: If the layout of a tensor is not known.
    """
    started = time.perf_counter()
    engine = config.rollout.engine
    trainer, shape = config.trainer, config.model.shape
    tensors = tuple(decoder_tensors(shape))
    num_replicas = trainer.num_ranks // trainer.tensor_parallel_size
    source = TrainingSide(
        tensors, num_replicas, trainer.zero_stage == 3, trainer.tensor_parallel_size, shape.num_kv_heads
    ).layout()
    destination = EngineSide(engine.type, shape, engine.tensor_parallel_size).layout(tensors)
    item_bytes = DTYPE_BYTES[config.model.dtype]
    plan = make_plan(source, destination, item_bytes)
    hops = relay_tree(["this node"] * config.rollout.num_engines)
    planning_s = time.perf_counter() - started
    model_bytes = shape.num_parameters * item_bytes
    return PlanReport(
        model_bytes=model_bytes,
        wire_bytes=plan.wire_bytes,
        lower_bound_bytes=lower_bound_bytes(source, destination, item_bytes),
        max_egress_bytes=max(plan.egress.values(), default=0),
        relayed_bytes=_relayed(destination, hops, item_bytes),
        gathered_bytes=model_bytes * engine.tensor_parallel_size * config.rollout.num_engines,
        num_copies=sum(1 for _ in plan.copies),
        num_buckets=len(plan.buckets),
        bucket_bytes=plan.bucket_bytes,
        relay_depth=depth(hops),
        planning_s=planning_s,
        links=_links(plan),
    )


def _links(plan: Plan) -> list[tuple[int, int, int]]:
    return sorted((src, dst, num_bytes) for (src, dst), num_bytes in plan.bytes_per_link.items())


def _relayed(destination: Layout, hops: tuple[Hop, ...], item_bytes: int) -> int:
    return len(hops) * sum(sum(sizes.values()) for sizes in destination.buffers) * item_bytes


def _print(config: RunConfig, report: PlanReport, console: Console) -> None:
    trainer, engine = config.trainer, config.rollout.engine
    split = f", tensor parallel {trainer.tensor_parallel_size}" if trainer.tensor_parallel_size > 1 else ""
    console.print(
        f"one publish: {trainer.num_ranks} training ranks ({trainer.backend}, ZeRO-{trainer.zero_stage}{split}) → "
        f"{config.rollout.num_engines} {engine.type} engines over {engine.tensor_parallel_size} devices each, "
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
    for name, value in (
        ("model", f"{report.model_bytes / MIB:,.1f} MiB"),
        ("sent by the training side", f"{report.wire_bytes / MIB:,.1f} MiB"),
        ("lower bound: what engine ranks hold", f"{report.lower_bound_bytes / MIB:,.1f} MiB"),
        ("busiest training rank sends", f"{report.max_egress_bytes / MIB:,.1f} MiB"),
        (
            "passed on from engine to engine",
            f"{report.relayed_bytes / MIB:,.1f} MiB, at most {report.relay_depth} hop(s) from the first",
        ),
        ("gather and broadcast would send", f"{report.gathered_bytes / MIB:,.1f} MiB"),
        ("copies", f"{report.num_copies:,} in {report.num_buckets:,} buckets of {report.bucket_bytes // MIB} MiB"),
        ("planned in", f"{report.planning_s:.2f} s"),
    ):
        console.print(f"  {name:<36}{value}")
    if config.weights.mode == "gather":
        console.print("  weights.mode=gather: this plan is not used, whole tensors go through rank 0.")
    elif report.relayed_bytes:
        console.print("  On one node engines map the same shared memory, so nothing is passed on.")
