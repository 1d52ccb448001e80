"""What `vs_trl.py` measured: figures of the two sides, the table, and the files it is written to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import mean, median, quantiles
from typing import Any

from alone import ROOT
from rich.console import Console
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results"
QUIET_PERCENT = 5.0
"""Of all cores. Others that took more make a run no measurement."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side; the lists have one entry per step.

    Attributes:
        step_s: Wall seconds.
        num_tokens: Response tokens trained.
        rewards: Mean reward.
        versions: Package -> version.
        others_percent: Share of all cores that other programs had meanwhile.
        cpu_s: CPU seconds of its process; empty for Penstock, which has several (step_profile.py).
        peak_gib: Largest memory of all its processes.
        accuracies: (steps so far, accuracy on held-out tasks); empty if that was not asked for.
    """

    step_s: list[float]
    num_tokens: list[float]
    rewards: list[float]
    versions: dict[str, str]
    others_percent: float
    cpu_s: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    accuracies: list[tuple[int, float]] = field(default_factory=list)

    def kept(self, warmup: int, count: int) -> Run:
        """`count` steps after the first `warmup`."""
        cut = slice(warmup, warmup + count)
        columns = ("step_s", "num_tokens", "rewards", "cpu_s")
        return replace(self, **{name: getattr(self, name)[cut] for name in columns})


def figures(runs: list[Run], samples_per_step: int) -> dict[str, float]:
    """What is reported of one side, over the steps of all its rounds."""
    step_s = list(chain.from_iterable(run.step_s for run in runs))
    num_tokens = sum(sum(run.num_tokens) for run in runs)
    first, middle, third = quantiles(step_s, n=4, method="inclusive")
    return {
        "n": len(step_s),
        "median_s": middle,
        "first_quartile_s": first,
        "third_quartile_s": third,
        "samples_per_s": samples_per_step * len(step_s) / sum(step_s),
        "trained_tokens_per_s": num_tokens / sum(step_s),
        "mean_response_tokens": num_tokens / samples_per_step / len(step_s),
        "mean_reward": mean(chain.from_iterable(run.rewards for run in runs)),
    }


def table_rows(ours: dict[str, float], theirs: dict[str, float]) -> list[tuple[str, ...]]:
    """What, Penstock, TRL, TRL / Penstock."""

    def row(label: str, key: str, digits: int) -> tuple[str, ...]:
        return label, f"{ours[key]:,.{digits}f}", f"{theirs[key]:,.{digits}f}", f"{theirs[key] / ours[key]:.2f}"

    spread = [f"{side['first_quartile_s']:.3f} … {side['third_quartile_s']:.3f}" for side in (ours, theirs)]
    return [
        row("step, median, s", "median_s", 3),
        ("step, inter-quartile range, s", *spread, ""),
        ("steps measured, n", str(ours["n"]), str(theirs["n"]), ""),
        row("samples per s", "samples_per_s", 0),
        row("trained tokens per s", "trained_tokens_per_s", 0),
        row("tokens per response", "mean_response_tokens", 1),
        row("mean reward of these steps", "mean_reward", 3),
    ]


def describe(results: dict[str, Any]) -> list[str]:
    """One sentence each on the ratio, the machine, what both sides share, and versions."""
    ratio, shared, runs = (results[key] for key in ("ratio_trl_over_penstock", "shared", "runs"))
    others = max(run["others_percent"] for run in chain(*runs.values()))
    medians = {side: [f"{median(run['step_s']):.3f}" for run in runs[side]] for side in runs}
    versions = {
        side: ", ".join(f"{name} {version}" for name, version in runs[side][0]["versions"].items()) for side in runs
    }
    return [
        f"ratio TRL / Penstock of the median step: {ratio:.2f} "
        f"(Penstock's step takes {1 / ratio:.2f} times as long as TRL's)",
        f"medians of the rounds, s: Penstock {', '.join(medians['penstock'])}; TRL {', '.join(medians['trl'])}",
        *results["provenance"],
        f"others had up to {others:.0f} % of the cores during a run"
        + (": NOT ALONE, no valid comparison" if others > QUIET_PERCENT else ""),
        f"both: {shared['policy']}, {shared['batch_groups']} groups × {shared['group_size']} trajectories, at most "
        f"{shared['max_new_tokens']} tokens, temperature {shared['temperature']}, lr {shared['lr']}, no KL term",
        f"TRL: transformers generate, per_device_train_batch_size {shared['micro_batch']}, {shared['threads']} threads",
        f"versions, Penstock: {versions['penstock']}",
        f"versions, TRL: {versions['trl']}",
        f"by: python {' '.join(results['command'])}",
    ]


def report(console: Console, results: dict[str, Any]) -> None:
    """The table on the console and in vs_trl.md; everything in vs_trl.json."""
    header = ("", "Penstock", "TRL", "TRL / Penstock")
    rows, notes = table_rows(results["penstock"], results["trl"]), describe(results)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table, *notes, sep="\n")
    lines = ["| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *rows)]
    text = ["# A step of the demo and a step of TRL's GRPOTrainer", "", *lines, "", *(f"- {note}" for note in notes)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "vs_trl.md").write_text("\n".join(text) + "\n")
    (RESULTS / "vs_trl.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written to {RESULTS.relative_to(ROOT)}/vs_trl.md and vs_trl.json")
