"""`make real` beside TRL's `GRPOTrainer`: step time, time to equal reward, memory.

    python benchmarks/pretrained_vs_trl.py     # the time of a step: TRL's best micro-batch, then three rounds
    python benchmarks/pretrained_vs_trl.py --rounds 1 --steps 30 --micro-batches 32     # until both know the task

Both train SmolLM2-135M (runs/smollm2, which `make real` makes) on the rows of `experiment=facts`, in float32, with the
same batch, lengths and learning rate, each on all cores (vs_trl.py has what TRL is given, and its environment). Every
row is trained on once, so the reward of a batch is that of sampled answers to tasks that are new to the policy.
TRL gets the `per_device_train_batch_size` with the quickest step of a short sweep; then both run alternately.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from alone import BENCH, ROOT, run_alone
from provenance import provenance
from vs_trl import PENSTOCK, run_trl, trl_python, trl_spec
from vs_trl_report import Run

from penstock.platform.checks.load import compose_config

CONF = ROOT / "examples" / "pretrained" / "conf"
OVERRIDES = ["experiment=facts"]
NUM_ANSWERS = 64
"""Of a step, on both sides."""
AVERAGED, ENOUGH = 3, (0.5, 0.9)
"""The time to a reward is when the mean of so many batches reaches it."""
NUM_SIGNAL_STEPS = 8
"""Of the first so many batches, in which every group has a signal to train on, the time of a step is compared."""
NUM_SWEEP_STEPS = 3


def run_penstock(num_steps: int, timeout_s: float) -> Run:
    run_dir = BENCH / "facts"
    own = ["name=facts", f"run_dir={run_dir}", "overwrite=true", f"total_steps={num_steps}"]
    no_evaluation = ["evaluation.every_steps=0", "evaluation.num_tasks=2", "evaluation.num_tasks_during_training=2"]
    command: list[str | Path] = [PENSTOCK, "train", "--config-dir", CONF, *OVERRIDES, *own, *no_evaluation]
    others = run_alone("facts", command, timeout_s)
    lines = (json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [metrics for metrics in lines if "throughput/step_s" in metrics]
    return Run(
        step_s=[metrics["throughput/step_s"] for metrics in steps],
        num_tokens=[metrics["throughput/trained_tokens_per_s"] * metrics["throughput/step_s"] for metrics in steps],
        rewards=[metrics["reward/mean"] for metrics in steps],
        versions={},
        others_percent=others,
        peak_gib=json.loads((run_dir / "summary.json").read_text())["peak_memory_gib"],
    )


def seconds_to(run: Run, reward: float) -> float | None:
    """Seconds of steps until the mean reward of the last batches has reached it; None if it has not."""
    for step in range(AVERAGED, len(run.rewards) + 1):
        if sum(run.rewards[step - AVERAGED : step]) / AVERAGED >= reward:
            return sum(run.step_s[:step])
    return None


def fastest_micro_batch(python: Path, spec: dict[str, Any], sizes: list[int], timeout_s: float) -> int:
    """The size with which TRL's quickest step is shortest; the first step of a run warms up and does not count."""
    if len(sizes) == 1:
        return sizes[0]
    seconds: dict[int, float] = {}
    for size in sizes:
        setting = {"micro_batch": size, "steps": NUM_SWEEP_STEPS}
        run = run_trl("trl-sweep", python, spec | setting, timeout_s)
        seconds[size] = min(run.step_s[1:])
        print(f"TRL, per_device_train_batch_size={size}: {seconds[size]:.1f} s, {run.peak_gib:.1f} GiB", flush=True)
    return min(sizes, key=seconds.__getitem__)


def table(runs: dict[str, list[Run]]) -> str:
    """Both sides, all rounds; the time to a reward is of the first round."""
    lines = ["| | Penstock | TRL | ratio |", "|---|---|---|---|"]

    def row(what: str, cells: list[float], digits: int) -> None:
        lines.append(f"| {what} | {cells[0]:.{digits}f} | {cells[1]:.{digits}f} | {cells[0] / cells[1]:.2f} |")

    def text(what: str, cells: list[str]) -> None:
        lines.append(f"| {what} | {cells[0]} | {cells[1]} | |")

    sides = list(runs.values())
    early = [[run.step_s[1:NUM_SIGNAL_STEPS] for run in side] for side in sides]
    for number in range(len(sides[0])):
        row(f"step, median of round {number + 1}, s", [median(side[number]) for side in early], 1)
    all_steps = [list(chain.from_iterable(side)) for side in early]
    row(f"step, median of all {len(all_steps[0])}, s", [median(one) for one in all_steps], 1)
    quartiles = [quantiles(one, n=4, method="inclusive") for one in all_steps]
    text("inter-quartile range, s", [f"{first:.1f} … {third:.1f}" for first, _, third in quartiles])
    answers = [median(side[0].num_tokens[1:NUM_SIGNAL_STEPS]) / NUM_ANSWERS for side in sides]
    row("tokens per answer", answers, 1)
    for reward in ENOUGH:
        found = [seconds_to(side[0], reward) for side in sides]
        reached = [one for one in found if one is not None]
        if len(reached) == len(found):
            row(f"time to a sampled reward of {reward}, s", reached, 0)
    text("steps, last reward", [f"{len(side[0].rewards)}, {side[0].rewards[-1]:.2f}" for side in sides])
    row("peak memory, GiB, largest of the rounds", [max(run.peak_gib for run in side) for side in sides], 1)
    text("cores that others had, %", [", ".join(f"{run.others_percent:.1f}" for run in side) for side in sides])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, alternating")
    parser.add_argument("--steps", type=int, default=NUM_SIGNAL_STEPS, help="steps of each run")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16, 32, 64], help="tried for TRL")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="longest time for one run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that what runs is ended
    sys.path.append(str(ROOT))  # for examples.pretrained
    python, limit_s = trl_python(), arguments.timeout_s
    config = compose_config(OVERRIDES, config_dir=CONF)
    spec = trl_spec(config, str(ROOT / str(config.model.path)), arguments.steps)
    spec |= {"micro_batch": fastest_micro_batch(python, spec, arguments.micro_batches, limit_s)}
    runs: dict[str, list[Run]] = {"penstock": [], "trl": []}
    for number in range(arguments.rounds):
        runs["penstock"].append(run_penstock(arguments.steps, limit_s))
        runs["trl"].append(run_trl("trl-facts", python, spec, limit_s))
        for side, of_side in runs.items():
            print(f"round {number + 1}, {side}: {median(of_side[-1].step_s[1:]):.1f} s per step", flush=True)
    rewards = {side: [run.rewards for run in of_side] for side, of_side in runs.items()}
    (BENCH / "pretrained_vs_trl.json").write_text(json.dumps(rewards))
    print(json.dumps([provenance(), {"micro_batch": spec["micro_batch"]}]))
    print(table(runs))


if __name__ == "__main__":
    main()
