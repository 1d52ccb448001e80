"""`make real` beside TRL's `GRPOTrainer`: step time, time to equal reward, memory.

    python benchmarks/pretrained_vs_trl.py [--steps 30] [--micro-batch 32]

Both train SmolLM2-135M (runs/smollm2, which `make real` makes) on the rows of `experiment=facts`, in float32, with the
same batch, lengths and learning rate, each on all cores (vs_trl.py has what TRL is given, and its environment). Every
row is trained on once, so the reward of a batch is that of sampled answers to tasks that are new to the policy.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from statistics import median, quantiles

from alone import BENCH, ROOT, run_alone
from provenance import provenance
from vs_trl import PENSTOCK, run_trl, trl_python, trl_spec
from vs_trl_report import Run

from penstock.platform.checks.load import compose_config

CONF = ROOT / "examples" / "pretrained" / "conf"
OVERRIDES = ["experiment=facts"]
AVERAGED, ENOUGH = 3, (0.5, 0.9)
"""The time to a reward is when the mean of so many batches reaches it."""


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


def table(runs: dict[str, Run], num_signal_steps: int) -> str:
    """Both sides; steps of the first batches only, in which every group has a signal to train on."""
    lines = ["| | Penstock | TRL |", "|---|---|---|"]

    def row(what: str, *cells: str) -> None:
        lines.append(f"| {what} | {' | '.join(cells)} |")

    early = {side: run.step_s[1:num_signal_steps] for side, run in runs.items()}
    row(f"step, median of {num_signal_steps - 1}, s", *(f"{median(one):.1f}" for one in early.values()))
    quartiles = (quantiles(one, n=4, method="inclusive") for one in early.values())
    row("inter-quartile range, s", *(f"{first:.1f} … {third:.1f}" for first, _, third in quartiles))
    row("tokens per answer", *(f"{median(run.num_tokens[1:num_signal_steps]) / 64:.1f}" for run in runs.values()))
    for reward in ENOUGH:
        found = (seconds_to(run, reward) for run in runs.values())
        row(f"time to a sampled reward of {reward}, s", *("-" if one is None else f"{one:.0f}" for one in found))
    row("steps, last reward", *(f"{len(run.rewards)}, {run.rewards[-1]:.2f}" for run in runs.values()))
    row("peak memory, GiB", *(f"{run.peak_gib:.1f}" for run in runs.values()))
    row("cores that others had, %", *(f"{run.others_percent:.1f}" for run in runs.values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="steps of Penstock")
    parser.add_argument("--trl-steps", type=int, default=30, help="steps of TRL")
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's per_device_train_batch_size")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="longest time for one run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that what runs is ended
    sys.path.append(str(ROOT))  # for examples.pretrained
    python = trl_python()
    config = compose_config(OVERRIDES, config_dir=CONF)
    spec = trl_spec(config, str(ROOT / str(config.model.path)), arguments.trl_steps)
    spec |= {"micro_batch": arguments.micro_batch}
    runs = {
        "penstock": run_penstock(arguments.steps, arguments.timeout_s),
        "trl": run_trl("trl-facts", python, spec, arguments.timeout_s),
    }
    (BENCH / "pretrained_vs_trl.json").write_text(json.dumps({side: run.rewards for side, run in runs.items()}))
    print(json.dumps(provenance()))
    print(table(runs, min(8, arguments.trl_steps, arguments.steps)))


if __name__ == "__main__":
    main()
