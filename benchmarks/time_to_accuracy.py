"""Wall time until the demo's policy solves 95 % of held-out tasks: Penstock and TRL's `GRPOTrainer`, from one policy.

    python benchmarks/time_to_accuracy.py [--seeds 3:8] [--steps 50]     (4 minutes a seed)

Both have the settings of vs_trl.py, TRL those that were fastest there (benchmarks/results/vs_trl.json), Penstock those
of the demo. They were chosen with the seeds 0 to 2 (results/time_to_accuracy_settings.md), which are not measured. A
seed decides on the warm start, which both share, on tasks and on sampling. Greedy accuracy on the same 256 held-out
tasks is measured every 5 steps. TRL's clock stands meanwhile; Penstock's does not: its evaluations share the engine
with the rollouts. An evaluation counts from the end of the step whose version it measured last. The time at which 95 %
is passed is interpolated between two evaluations. Loading and the warm start do not count. Where the curve is flat,
that time is mostly chance (256 tasks have a standard error of 0.014 at 0.95), so the mean accuracy over the first
`SPAN_S` seconds is compared too.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean, median

import numpy as np
from alone import BENCH, ROOT, run_alone
from provenance import provenance
from vs_trl import PENSTOCK, run_trl, trl_python, trl_spec

from penstock.envs.loading import load_task_source
from penstock.platform.checks.load import compose_config
from penstock.platform.cli.simulate import parse_seeds
from penstock.platform.config.schema import RunConfig

GOAL, EVERY, NUM_TASKS, LIMIT_S = 0.95, 5, 256, 900.0
SPAN_S = 50.0
RESULT = Path(__file__).parent / "results" / "time_to_accuracy.md"
Curve = list[tuple[float, float]]
"""(seconds of training, accuracy)"""
Row = tuple[int, tuple[Curve, float], tuple[Curve, float]]
"""Seed, and for Penstock and TRL the curve and the share of the cores that others had, percent."""


def passed_s(curve: Curve) -> float | None:
    """Seconds until the goal is passed; None if it is not."""
    for (before_s, before), (after_s, after) in pairwise(curve):
        if after >= GOAL:
            return before_s + (after_s - before_s) * (GOAL - before) / (after - before)
    return None


def mean_accuracy(curve: Curve) -> float:
    """Mean over the first `SPAN_S` seconds, linear between evaluations."""
    times, accuracies = zip(*curve, strict=True)
    return float(np.interp(np.linspace(0.0, SPAN_S, 501), times, accuracies).mean())


def penstock_curve(name: str, overrides: list[str], num_steps: int) -> tuple[Curve, float]:
    """The curve of one run, and the share of the cores that others had, percent."""
    run_dir = BENCH / name
    own = [f"name={name}", f"run_dir={run_dir}", "overwrite=true", f"total_steps={num_steps}"]
    evaluation = [f"evaluation.every_steps={EVERY}", f"evaluation.num_tasks={NUM_TASKS}"]
    others = run_alone(name, [PENSTOCK, "train", *overrides, *own, *evaluation], LIMIT_S)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if "eval/accuracy" in record["metrics"]]
    begun = evaluations[0]["time_s"]
    ended = {record["step"]: record["time_s"] - begun for record in records if "throughput/step_s" in record["metrics"]}
    return [
        (ended.get(int(one["metrics"]["eval/version_max"]), 0.0), one["metrics"]["eval/accuracy"])
        for one in evaluations
    ], others


def trl_curve(name: str, config: RunConfig, policy: str, num_steps: int) -> tuple[Curve, float]:
    """The same of TRL."""
    tasks = BENCH / "held-out.jsonl"
    held_out = load_task_source(config.env, config.seed).held_out(NUM_TASKS)
    tasks.write_text("".join(json.dumps({"prompt": task.prompt, **task.fields}) + "\n" for task in held_out))
    fastest = json.loads((RESULT.parent / "vs_trl.json").read_text())["shared"]
    spec = trl_spec(config, policy, num_steps) | {name: fastest[name] for name in ("micro_batch", "threads")}
    run = run_trl(name, trl_python(), spec | {"eval_tasks": str(tasks), "eval_every": EVERY}, LIMIT_S)
    times = [0.0, *accumulate(run.step_s)]
    return [(times[step], accuracy) for step, accuracy in run.accuracies], run.others_percent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=parse_seeds, default="3:8", help="one, or from:to")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    trl_python()
    rows: list[Row] = []
    for seed in arguments.seeds:
        overrides = ["experiment=arithmetic", f"seed={seed}"]
        config = compose_config(overrides)
        policy = str(config.model.path)
        if not (ROOT / policy).is_dir():
            run_alone("sft", [PENSTOCK, "sft", "experiment=arithmetic_sft", f"seed={seed}", "overwrite=true"], LIMIT_S)
        ours = penstock_curve(f"to-accuracy-penstock-{seed}", overrides, arguments.steps)
        theirs = trl_curve(f"to-accuracy-trl-{seed}", config, policy, arguments.steps)
        rows.append((seed, ours, theirs))
        print(f"seed {seed}: Penstock {ours}, TRL {theirs}", flush=True)
    notes = [f"- {note}" for note in [*provenance(), "by: python benchmarks/time_to_accuracy.py"]]
    RESULT.write_text("\n".join([*table(rows, arguments.steps), "", *notes]) + "\n")


def table(rows: list[Row], num_steps: int) -> list[str]:
    """Lines of the result, without its notes."""
    lines = [f"# Seconds of training until {GOAL:.0%} of held-out tasks are solved, and accuracy on the way", ""]
    span = f"mean of {SPAN_S:g} s"
    lines += [
        f"| seed | accuracy at the start | Penstock, s | TRL, s | Penstock, {span} | TRL, {span} | others, % |",
        "|" + " --- |" * 7,
    ]
    ratios, differences = [], []
    for seed, (curve, others), (trl, others_of_trl) in rows:
        took, took_trl = passed_s(curve), passed_s(trl)
        if took is not None and took_trl is not None:
            ratios.append(took / took_trl)
        differences.append(mean_accuracy(curve) - mean_accuracy(trl))
        cells = [f"{one:.1f}" if one is not None else f"not in {num_steps} steps" for one in (took, took_trl)]
        cells += [f"{mean_accuracy(curve):.3f}", f"{mean_accuracy(trl):.3f}", f"{others:.0f}, {others_of_trl:.0f}"]
        lines.append(f"| {seed} | {curve[0][1]:.3f}, {trl[0][1]:.3f} | {' | '.join(cells)} |")
    spread = f"{mean(differences):+.3f} ({min(differences):+.3f} … {max(differences):+.3f})"
    lines += ["", f"Mean accuracy, Penstock − TRL: {spread}, n = {len(rows)} seeds."]
    if ratios:
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
        lines += [f"Median ratio of the times {spread}, n = {len(ratios)} seeds in which both passed {GOAL:.0%}."]
    return lines


if __name__ == "__main__":
    main()
