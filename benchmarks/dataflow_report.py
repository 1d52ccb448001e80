"""What `dataflow.py` measured: figures of the two sides, the table, and the files it is written to."""

from __future__ import annotations

import json
from itertools import chain
from statistics import median
from typing import Any

from alone import ROOT
from rich.console import Console
from rich.table import Table
from vs_trl_report import QUIET_PERCENT, RESULTS

GIB = float(1 << 30)
HEADER = ("", "Penstock", "TransferQueue", "ratio")
SIDES = ("penstock", "transferqueue")


def figures(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one side, and the range of its speed."""
    speeds = [result["groups_per_s"] for result in rounds]
    return {
        "n": len(rounds),
        "groups_per_s": median(speeds),
        "slowest_groups_per_s": min(speeds),
        "fastest_groups_per_s": max(speeds),
        "cpu_ms_per_group": median(result["cpu_ms_per_group"] for result in rounds),
        "rest_gib": median(result["rest_bytes"] for result in rounds) / GIB,
        "peak_gib": median(result["peak_bytes"] for result in rounds) / GIB,
        "added_gib": median(result["peak_bytes"] - result["rest_bytes"] for result in rounds) / GIB,
    }


def table_rows(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, ...]]:
    """What, Penstock, TransferQueue, ratio."""

    def less(label: str, key: str) -> tuple[str, ...]:
        return label, f"{ours[key]:.2f}", f"{theirs[key]:.2f}", f"{theirs[key] / ours[key]:.2f}"

    speed = ours["groups_per_s"] / theirs["groups_per_s"]
    ranges = [f"{side['slowest_groups_per_s']:,.0f} … {side['fastest_groups_per_s']:,.0f}" for side in (ours, theirs)]
    return [
        ("groups per s, median", f"{ours['groups_per_s']:,.0f}", f"{theirs['groups_per_s']:,.0f}", f"{speed:.2f}"),
        ("groups per s, range", *ranges, ""),
        ("rounds, n", str(ours["n"]), str(theirs["n"]), ""),
        less("CPU time per group, all processes, ms", "cpu_ms_per_group"),
        less("peak memory, all processes, GiB", "peak_gib"),
        less("of it before the first group, GiB", "rest_gib"),
        less("added by the work, GiB", "added_gib"),
    ]


def describe(results: dict[str, Any]) -> list[str]:
    """One sentence each on the ratio, the work, settings, the machine and versions."""
    work, rounds, settings = (results[key] for key in ("work", "rounds", "settings"))
    pairs = zip(rounds["penstock"], rounds["transferqueue"], strict=True)
    ratios = ", ".join(f"{ours['groups_per_s'] / theirs['groups_per_s']:.2f}" for ours, theirs in pairs)
    loads = {name: ", ".join(f"{result['load']:.1f}" for result in rounds[name]) for name in SIDES}
    others = max(result["others_percent"] for result in chain(*rounds.values()))
    chosen = {name: ", ".join(f"{key}={value}" for key, value in settings[name].items()) for name in SIDES}
    versions = {name: ", ".join(f"{k} {v}" for k, v in rounds[name][0]["versions"].items()) for name in SIDES}
    return [
        f"ratio of the speeds, round by round: {ratios}",
        f"work: {work['num_groups']:,} groups × {work['group_size']} trajectories × {work['num_tokens']:,} tokens, "
        f"{work['num_bytes'] / GIB:.2f} GiB in six fields; batches of {work['batch_groups']} groups, "
        f"at most {work['window']} groups under way",
        "both: driver, 2 generation, 1 scoring and 2 logprob workers, 2 trainer ranks, Ray on this machine; the ranks "
        "summed every byte, and the sums of both sides were equal",
        f"best settings of the sweep: Penstock {chosen['penstock']}; TransferQueue {chosen['transferqueue']}, "
        "SimpleStorage, metadata handed on by the driver, regular tensors",
        "memory: private memory of all processes (PSS) and shared memory once, peak of samples every 0.1 s; "
        "TransferQueue's workers import torch, which it needs, ours do not",
        "measured are the columns of dataflow/columns.py, which no run of Penstock uses: its driver puts each ready "
        "group as one object. The figures say nothing of the speed of training",
        *results["provenance"],
        f"others had up to {others:.0f} % of the cores; load average: "
        f"Penstock {loads['penstock']}; TransferQueue {loads['transferqueue']}"
        + ("; NOT ALONE: the figures are low for both, only the ratio counts" if others > QUIET_PERCENT else ""),
        f"versions, Penstock: {versions['penstock']}",
        f"versions, TransferQueue: {versions['transferqueue']}",
        f"by: python {' '.join(results['command'])}, {results['wall_s']} s",
    ]


def report(console: Console, results: dict[str, Any]) -> None:
    """The table on the console and in dataflow.md; everything in dataflow.json."""
    results = {name: figures(results["rounds"][name]) for name in SIDES} | results
    rows, notes = table_rows(*(results[name] for name in SIDES)), describe(results)
    table = Table(*HEADER)
    for row in rows:
        table.add_row(*row)
    console.print(table, *notes, sep="\n")
    lines = ["| " + " | ".join(row) + " |" for row in (HEADER, ("---",) * len(HEADER), *rows)]
    text = ["# The dataflow and TransferQueue on the same work", "", *lines, "", *(f"- {note}" for note in notes)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "dataflow.md").write_text("\n".join(text) + "\n")
    (RESULTS / "dataflow.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written to {RESULTS.relative_to(ROOT)}/dataflow.md and dataflow.json")
