"""What `--dry-run` prints: the resolved configuration, where every process would run, and what to know before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from penstock.dataflow.ids import POLICY
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.findings import Command
from penstock.platform.config.load import LoadedConfig
from penstock.platform.config.schema import RunConfig
from penstock.platform.memory import Part, published_gib, shared_gib
from penstock.platform.placement import RolePlacement, device_load_gib, host_load_gib, plan_placement
from penstock.platform.transports import SLOT_WAYS, way_of

_LEAST_GIB = 0.005


def print_dry_run(loaded: LoadedConfig, command: Command, console: Console) -> None:
    """Print configuration, placement and warnings of a run that is not started."""
    placements = plan_placement(loaded.config, command)
    console.print(Syntax(to_yaml(loaded.config).rstrip(), "yaml", background_color="default", word_wrap=True))
    console.print()
    console.print(placement_table(placements))
    for line in load_lines(loaded.config, placements):
        console.print(line)
    if command == "train":
        console.print(weights_line(loaded.config))
    print_warnings(loaded.warnings, console)
    console.print("dry run: nothing was started.", style="bold")


def print_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print one line per warning."""
    for warning in warnings:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", soft_wrap=True)


def placement_table(placements: Sequence[RolePlacement]) -> Table:
    """Roles × processes × devices × memory of each; equal processes share a row."""
    table = Table(title="placement", title_justify="left")
    for heading in ("role", "processes", "pool", "devices of it", "device GiB", "main GiB"):
        table.add_column(heading, no_wrap=True)
    for same in _rows(placements):
        first = same[0]
        on_gpu = first.device == "gpu"
        slots = ",".join(str(slot) for slot in sorted({p.slot + extra for p in same for extra in range(p.num_slots)}))
        table.add_row(
            _who(first),
            str(len(same)),
            first.pool or "-",
            f"gpu {slots}" if on_gpu else "cpu",
            f"{first.memory.device_gib:.1f}" if on_gpu else "-",
            f"{first.memory.host_gib:.1f}",
        )
    return table


def load_lines(config: RunConfig, placements: Sequence[RolePlacement]) -> list[str]:
    """What takes the memory of one process of each role, then estimated totals."""
    lines = [
        f"each {_who(same[0])}: "
        + _memory_words(same[0].memory.device if same[0].device == "gpu" else same[0].memory.host)
        for same in _rows(placements)
    ]
    lines += [
        f"pool {pool}: up to {load:.1f} of {config.cluster.pools[pool].memory_gib:g} GiB on a GPU (estimate)"
        for pool, load in device_load_gib(config, list(placements)).items()
    ]
    return [*lines, f"main memory: {host_load_gib(list(placements)):.1f} GiB in all (estimate)"]


def weights_line(config: RunConfig) -> str:
    """How versions travel, and what that takes."""
    way = way_of(config)
    if way in SLOT_WAYS:
        gib = published_gib(config) / config.rollout.engine.tensor_parallel_size
        return f"weights by {way}: 1 slot of {gib:.2f} GiB for each rank of an engine"
    return f"weights by {way}: {shared_gib(config):.2f} GiB of shared memory"


def _rows(placements: Sequence[RolePlacement]) -> Iterable[list[RolePlacement]]:
    rows: dict[tuple[str, str | None], list[RolePlacement]] = {}
    for placement in placements:
        rows.setdefault((_who(placement), placement.pool), []).append(placement)
    return rows.values()


def _who(placement: RolePlacement) -> str:
    return placement.role if placement.policy_id == POLICY else f"{placement.policy_id} {placement.role}"


def _memory_words(parts: dict[Part, float]) -> str:
    """`weights 1.0 GiB, optimizer 3.1 GiB`; parts too small to print are left out."""
    return ", ".join(f"{name} {gib:.2f} GiB" for name, gib in parts.items() if gib >= _LEAST_GIB)
