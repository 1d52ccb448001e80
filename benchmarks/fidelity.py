"""What asynchrony costs in accuracy: task × staleness bound η × correction × seed, at equal samples.

    make fidelity                                                          (hours; continues where it was interrupted)
    python benchmarks/fidelity.py [--tasks arithmetic countdown] [--seeds 0:5] [--minutes 60] [--retry] [--plan]

A cell is one run of `penstock train`. All cells of a task start from one policy, made once by `penstock sft`, and train
the same number of trajectories; engine and trainer share the machine's cores at every η. The cells of a seed differ in
nothing but η and the correction of stale tokens, so differences are taken within seeds. The tasks and their settings
were chosen with η = 0 and `POLICY_SEED`, which is no seed of a cell.

Every finished cell is written to results/fidelity.json at once, and is not run again while its settings are the same,
in this checkout or a later one. results/fidelity.md and docs/images/fidelity.svg are made from that file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from alone import BENCH, ROOT, run_alone
from fidelity_report import ARMS, Cell, Record, write_report
from provenance import provenance

from penstock.platform.cli.simulate import parse_seeds
from penstock.platform.cli.sweep import STALENESS_METRIC
from penstock.platform.metrics.atomic_file import write_text_atomically
from penstock.platform.metrics.trackers.jsonl import read_metrics

RESULTS = ROOT / "benchmarks" / "results" / "fidelity.json"
PENSTOCK = Path(sys.executable).with_name("penstock")
POLICY_SEED = 100
CORRECTIONS = {"none": "none", "uncorrected": "none", "decoupled": "decoupled", "TIS": "tis_token"}
"""Correction of a cell -> `algorithm/correction`. With `proximal=target`, `none` trains stale tokens as if the current
policy had sampled them."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task of the comparison.

    Attributes:
        warm_start: Overrides of the `penstock sft` that makes the policy of all its cells.
        training: Overrides that all its runs of `penstock train` share.
    """

    warm_start: tuple[str, ...]
    training: tuple[str, ...]


COUNTDOWN = (
    "env.factory=countdown:CountdownTasks",
    "env.args={chat: false, num_numbers: 2, max_number: 99, max_target: 300}",  # 1,096 tasks are held out
    "reward.fn=countdown:countdown_reward",
)
NUMBERS_ONLY = ("env.factory=fidelity_tasks:NumbersOnly", "reward.fn=fidelity_tasks:verified_by_reasoning_gym")
_SORTING = "{min_numbers: 3, max_numbers: 6, min_decimals: 0, max_decimals: 0, min_value: 0, max_value: 99}"
NUMBER_SORTING = (*NUMBERS_ONLY, f"env.args={{dataset: number_sorting, config: {_SORTING}}}")
GCD = (
    *NUMBERS_ONLY,
    "env.args={dataset: gcd, config: {min_value: 1, max_value: 99}}",
    "rollout.sampling.max_new_tokens=72",  # the longest gold answer has 67
)
TRAINING = ("experiment=arithmetic", "trainer.optimizer.warmup_steps=10")
"""What all tasks share. The warm-up is stated, since the demo has none."""
TASKS = {
    "arithmetic": Task(("experiment=arithmetic_sft",), (*TRAINING, "total_steps=30")),
    "countdown": Task(
        (
            "experiment=arithmetic_sft",
            "sft.eval_tasks=400",
            "sft.stop_at_accuracy=0.45",
            "sft.max_greedy_accuracy=0.8",
            *COUNTDOWN,
        ),
        (*TRAINING, "total_steps=120", "trainer.optimizer.lr=1e-4", *COUNTDOWN),
    ),
    "running_total": Task(
        ("experiment=arithmetic_sft",),
        (
            *TRAINING,
            "total_steps=30",
            "env.factory=fidelity_tasks:RunningTotal",
            "~env.args",
            "env.episode.max_threads=2",
            "reward=episode",
        ),
    ),
    "number_sorting": Task(
        ("experiment=arithmetic_sft", "sft.eval_every_steps=10", *NUMBER_SORTING),
        (*TRAINING, "total_steps=30", *NUMBER_SORTING),
    ),
    "gcd": Task(("experiment=arithmetic_sft", "sft.eval_every_steps=10", *GCD), (*TRAINING, "total_steps=30", *GCD)),
}
FIRST = ("arithmetic", "countdown")
"""Tasks whose seeds are completed before any other task begins."""


def ordered_cells(tasks: Iterable[str], seeds: Sequence[int]) -> list[Cell]:
    """All cells, in an order that makes the table useful early.

    The seeds of the tasks in `FIRST` come before all other tasks. Within both, all cells of one seed come before the
    next seed, and those of a task follow each other, with η = 0 first.
    """
    tasks = list(tasks)
    waves = [[task for task in tasks if task in FIRST], [task for task in tasks if task not in FIRST]]
    return [Cell(task, *arm, seed) for wave in waves for seed in seeds for task in wave for arm in ARMS]


def settings_of(cell: Cell) -> list[str]:
    """The overrides of the cell's `penstock train`, without paths."""
    task = TASKS[cell.task]
    return [
        *task.training,
        "algorithm=grpo",
        f"algorithm/correction={CORRECTIONS[cell.correction]}",
        "algorithm.proximal=target",
        f"dataflow.max_staleness={cell.max_staleness}",
        "evaluation.every_steps=0",
        f"seed={cell.seed}",
    ]


def is_finished(cell: Cell, policy: str, settings: list[str], records: Sequence[Record], *, retry: bool) -> bool:
    """Whether the cell need not run.

    A run with the same settings has finished, from the same policy or in a seed that is complete with another one: a
    warm start on another machine may give other weights, and a seed's cells are compared only if they share them.

    Args:
        cell: The cell.
        policy: Checksum of the policy that it would start from.
        settings: Its overrides.
        records: What has been recorded.
        retry: Whether cells that failed run again.
    """
    policies = {
        record.policy for record in records if record.cell == cell and record.settings == settings
        and (record.status == "completed" or (not retry and record.policy == policy))
    }  # fmt: skip
    return policy in policies or any(is_complete(cell, other, records) for other in policies)


def is_complete(cell: Cell, policy: str, records: Sequence[Record]) -> bool:
    """Whether all cells of the cell's task and seed have completed from `policy`."""
    arms = {
        (record.cell.max_staleness, record.cell.correction) for record in records
        if (record.cell.task, record.cell.seed, record.policy) == (cell.task, cell.seed, policy)
        and record.status == "completed" and record.settings == settings_of(record.cell)
    }  # fmt: skip
    return arms == set(ARMS)


def with_record(records: Sequence[Record], new: Record) -> list[Record]:
    """All records, with the new one in place of those of the same cell, settings and policy."""
    key = (new.cell, new.settings, new.policy)
    return [record for record in records if (record.cell, record.settings, record.policy) != key] + [new]


def read_records() -> list[Record]:
    """The finished cells of all earlier runs."""
    return [Record.from_dict(row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def write_records(records: Iterable[Record]) -> None:
    """Replace the file at once: one line per cell."""
    lines = ",\n".join(json.dumps(record.to_dict(), ensure_ascii=False) for record in records)
    write_text_atomically(RESULTS, f"[\n{lines}\n]\n")


def warm_start(task: str, timeout_s: float) -> tuple[Path, str]:
    """Make the policy that all cells of a task start from, if it is not there; returns its folder and checksum."""
    folder = BENCH / "fidelity" / f"{task}-policy"
    own = [f"name={folder.name}", f"run_dir={folder.relative_to(ROOT)}", f"seed={POLICY_SEED}", "overwrite=true"]
    command: list[str | Path] = [PENSTOCK, "sft", *TASKS[task].warm_start, *own, "sft.reuse=true"]
    run_alone(f"fidelity-{folder.name}", command, timeout_s)
    weights = (folder / "policy" / "model.safetensors").read_bytes()
    return folder / "policy", hashlib.sha256(weights).hexdigest()[:12]


def run_cell(cell: Cell, policy: Path, checksum: str, timeout_s: float) -> Record:
    """Run a cell to its end. A failure is a record too, with its reason."""
    settings, run_dir = settings_of(cell), BENCH / "fidelity" / cell.name
    own = [f"model.path={policy.relative_to(ROOT)}", f"name={cell.name}", f"run_dir={run_dir.relative_to(ROOT)}"]
    commit, machine = (line.partition(": ")[2] for line in provenance())
    source: dict[str, Any] = {"settings": settings, "policy": checksum, "commit": commit, "machine": machine}
    try:
        command: list[str | Path] = [PENSTOCK, "train", *settings, *own, "overwrite=true"]
        others_percent = run_alone(f"fidelity-{cell.name}", command, timeout_s)
    except SystemExit as failure:
        if not isinstance(failure.code, str):
            raise
        lines = [line.strip() for line in failure.code.splitlines() if line.strip()]
        reason = f"{lines[0]} … {lines[-1]}".replace(str(ROOT), ".")
        return Record(cell=cell, status="failed", reason=reason[:500], **source)
    summary = json.loads((run_dir / "summary.json").read_text())
    environment = json.loads((run_dir / "environment.json").read_text())
    metrics = [record.metrics for record in read_metrics(run_dir)]
    figures = measured(summary, metrics)
    shutil.rmtree(run_dir)
    versions = {"python": environment["python"], **environment["packages"]}
    return Record(
        cell=cell, status="completed", versions=versions, others_percent=round(others_percent, 1), **figures, **source
    )


def measured(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The figures of a completed run, from its summary and the metrics of its steps."""
    return {
        "start_accuracy": summary["eval_before"],
        "accuracy": summary["eval_after"],
        "wall_s": round(summary["wall_s"], 1),
        "steps_s": round(sum(step.get("throughput/step_s", 0.0) for step in metrics), 1),
        "stale_token_share": round(summary["share_tokens_stale"], 4),
        "mean_staleness": round(mean(step[STALENESS_METRIC] for step in metrics if STALENESS_METRIC in step), 3),
        "trained_groups": summary["trained_groups"],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=parse_seeds, default=range(5), help="FIRST:END, END excluded; default 0:5")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no cell starts later than this")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="longest time for one run")
    parser.add_argument("--retry", action="store_true", help="run cells again that failed")
    parser.add_argument("--plan", action="store_true", help="only list the cells, and write table and plot again")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that what runs is ended
    folders = [str(ROOT / "examples"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    started = time.monotonic()
    cells, records = ordered_cells(arguments.tasks, arguments.seeds), read_records()
    policies: dict[str, tuple[Path, str]] = {}
    for number, cell in enumerate(cells, start=1):
        where = f"[{number}/{len(cells)}] {cell.name}"
        if arguments.plan:
            print(where)
            continue
        if time.monotonic() - started > 60 * arguments.minutes:
            print(f"{where}: not begun, {arguments.minutes:g} minutes have passed")
            break
        settings = settings_of(cell)
        if is_finished(cell, "", settings, records, retry=arguments.retry):  # a complete seed: no policy is needed
            continue
        if cell.task not in policies:
            policies[cell.task] = warm_start(cell.task, arguments.timeout_s)
        policy, checksum = policies[cell.task]
        if is_finished(cell, checksum, settings, records, retry=arguments.retry):
            continue
        print(f"{where}: running", flush=True)
        record = run_cell(cell, policy, checksum, arguments.timeout_s)
        records = with_record(read_records(), record)
        write_records(records)
        write_report(records, settings_of)
        print(f"{where}: {record.reason or f'accuracy {record.accuracy:.3f}, {record.wall_s:.0f} s'}", flush=True)
    write_report(records, settings_of)
    print(f"{len(records)} runs are in {RESULTS.relative_to(ROOT)}; the table is fidelity.md in the same folder")


if __name__ == "__main__":
    main()
