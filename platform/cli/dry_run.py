"""Output of `--dry-run`: the configuration, the placement of every process, the first calls, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Column, Table

from penstock.actors.bundles import described
from penstock.dataflow.ids import POLICY
from penstock.platform.checks.load import LoadedConfig
from penstock.platform.cluster.hardware import total_memory_bytes
from penstock.platform.cluster.memory import GIB, published_gib, shared_gib
from penstock.platform.cluster.placement import (
    RolePlacement,
    device_bundles,
    device_load_gib,
    host_load_gib,
    plan_placement,
)
from penstock.platform.cluster.weight_routes import DEVICE_BUFFER_ROUTES, weight_route
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.findings import Command

_LEAST_GIB = 0.005
"""Smaller entries are not printed."""


def print_dry_run(loaded: LoadedConfig, command: Command, console: Console) -> None:
    """Print configuration, placement and warnings of a run without starting it."""
    config, placements = loaded.config, plan_placement(loaded.config, command)
    console.print(Syntax(to_yaml(config).rstrip(), "yaml", background_color="default", word_wrap=True))
    console.print()
    by_role: dict[tuple[str, str | None], list[RolePlacement]] = {}
    for placement in placements:
        policy = "" if placement.policy_id == POLICY else f"{placement.policy_id} "
        by_role.setdefault((f"{policy}{placement.role}", placement.pool), []).append(placement)
    console.print(placement_table(by_role))
    has_several_pools = len(config.rollout_views) > 1
    for (role, pool), (first, *_) in by_role.items():
        parts = first.memory.device if first.device == "gpu" else first.memory.host
        told = ", ".join(f"{name} {gib:.2f} GiB" for name, gib in parts.items() if gib >= _LEAST_GIB)
        console.print(f"each {role}{f' on {pool}' if has_several_pools and pool else ''}: {told}")
    if bundles := device_bundles(config, command):
        console.print(f"reserved at once: {described(bundles)}")
    for pool, load in device_load_gib(config, placements).items():
        of_one = config.cluster.pools[pool].limit_gib
        console.print(f"pool {pool}: up to {load:.1f} of {of_one:g} GiB on a GPU (estimate)")
    here = f", {total_memory_bytes() / GIB:.1f} GiB on this machine" if config.cluster.address == "local" else ""
    console.print(f"main memory: {host_load_gib(placements):.1f} GiB in all (estimate){here}")
    if command == "train":
        route = weight_route(config)
        if route in DEVICE_BUFFER_ROUTES:
            gib = published_gib(config) / config.rollout.engine.tensor_parallel_size
            console.print(f"weights by {route}: 1 slot of {gib:.2f} GiB for each rank of an engine")
        else:
            console.print(f"weights by {route}: {shared_gib(config):.2f} GiB of shared memory")
    if loaded.notes:
        console.print("\nfound before the start:")
    for told in loaded.notes:
        console.print(f"  {escape(told)}", soft_wrap=True)
    print_warnings(loaded.warnings, console)
    console.print("dry run: nothing was started.", style="bold")


def print_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print one line per warning."""
    for warning in warnings:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", soft_wrap=True)


def placement_table(by_role: Mapping[tuple[str, str | None], Sequence[RolePlacement]]) -> Table:
    """Table of roles, processes, devices and memory per process. Equal processes share a row."""
    headings = ("role", "processes", "pool", "devices of it", "device GiB", "main GiB")
    table = Table(*(Column(one, no_wrap=True) for one in headings), title="placement", title_justify="left")
    for (role, pool), same in by_role.items():
        memory, on_gpu = same[0].memory, same[0].device == "gpu"
        slots = sorted({slot for one in same for slot in range(one.slot, one.slot + one.num_slots)})
        table.add_row(
            role,
            str(len(same)),
            pool or "-",
            f"gpu {','.join(map(str, slots))}" if on_gpu else "cpu",
            f"{memory.device_gib:.1f}" if on_gpu else "-",
            f"{memory.host_gib:.1f}",
        )
    return table
