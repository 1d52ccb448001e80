"""Asynchronous against synchronous training where a tool call takes long now and then. Real runs, on this machine.

    python benchmarks/tool_latency.py [--policy DIR] [--steps 20] [--rounds 1] [--eta 4] [--tool-in environment]

Both runs are `penstock train experiment=arithmetic` with the environment of examples/slow_environment.py: after the
policy's turn a tool call sleeps for a lognormal time (mean 1 s, sigma 1.25, at most 30 s). With `--tool-in agent` the
same is an agent program that calls the policy itself; with `--tool-in reward` the tool sleeps in the reward
(examples/slow_tool.py). The runs differ in `dataflow.max_staleness` only. They
alternate; measured are groups per second from the end of one step to the end of a later one, without the first
`--warmup` steps of both and the last max_staleness + 1 of the asynchronous run, which need no generation. The
utilisation of the environments is that of the asynchronous run.

The upper limit of the gain: with enough concurrency asynchronous training is limited by the trainer alone, and a
synchronous step lasts at least as long as the slowest of its B·G tool calls, so

    limit = (trainer's step + E[max of B·G latencies]) ÷ trainer's step

with the trainer's step measured in the asynchronous run and the expectation computed from the same latencies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from provenance import provenance
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from slow_tool import tool_latency_s  # noqa: E402

PENSTOCK = Path(sys.executable).with_name("penstock")
BATCH, GROUP = 16, 8
TOOL_IN = {
    "environment": ("env.factory=slow_environment:CheckedSums", "env.episode.timeout_s=120", "reward=episode"),
    "agent": (
        "env=agent",
        "env.args.tasks=arithmetic",
        "env.args.agent=slow_environment:solve",
        "env.episode.timeout_s=120",
        "reward=episode",
    ),
    "reward": ("reward.fn=slow_tool:exact_match_after_tool", "reward.timeout_s=120"),
}
"""What a run of either kind says on its command line."""
TIMEOUT_S = 900
console = Console(highlight=False, soft_wrap=True)


def run(name: str, policy: str, eta: int, steps: int, tool_in: str) -> list[dict[str, float]]:
    """One run; returns its metrics of every step."""
    command = [
        str(PENSTOCK), "train", "experiment=arithmetic", f"name={name}", f"run_dir=.bench/{name}", "overwrite=true",
        f"model.path={policy}", f"total_steps={steps}", f"dataflow.max_staleness={eta}",
        f"dataflow.batch_groups={BATCH}", f"dataflow.group_size={GROUP}",
        *TOOL_IN[tool_in], "evaluation.every_steps=0", "evaluation.num_tasks=1",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT / "examples")}
    console.print(f"running {name}: {steps} steps, max_staleness {eta} …")
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    lines = (ROOT / ".bench" / name / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["metrics"] for line in lines]
    return [step for step in logged if "throughput/step_s" in step]


def groups_per_s(steps: list[dict[str, float]], warmup: int, eta: int) -> float:
    """Over the steps that still need generation."""
    measured = steps[warmup : len(steps) - (eta + 1 if eta else 0)]
    return BATCH * len(measured) / sum(step["throughput/step_s"] for step in measured)


def expected_slowest_s(num_steps: int, tool_in: str) -> float:
    """E[max of B·G latencies], over the very trajectories of the synchronous run; seconds."""
    tasks = "" if tool_in == "reward" else "arithmetic/train/"  # drawn by task and attempt, or by group and member
    starts = range(0, num_steps * BATCH + 1, BATCH)
    batches = [[f"{tasks}{group}/{one}" for group in range(a, b) for one in range(GROUP)] for a, b in pairwise(starts)]
    return mean(max(map(tool_latency_s, batch)) for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="runs/arithmetic_sft-seed0/policy")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sync-steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--eta", type=int, default=4)
    parser.add_argument("--tool-in", choices=TOOL_IN, default="environment")
    arguments = parser.parse_args()
    console.print(*provenance(), f"the tool sleeps in the {arguments.tool_in}", sep="\n")
    rates: dict[str, list[float]] = {"asynchronous": [], "synchronous": []}
    trainer_s: list[float] = []
    busy: list[float] = []
    for round_ in range(arguments.rounds):
        steps = run(f"latency-async-{round_}", arguments.policy, arguments.eta, arguments.steps, arguments.tool_in)
        rates["asynchronous"].append(groups_per_s(steps, arguments.warmup, arguments.eta))
        trainer_s += [step["trainer/step_s"] for step in steps[arguments.warmup :]]
        busy += [step["env/utilisation"] for step in steps[arguments.warmup :] if "env/utilisation" in step]
        steps = run(f"latency-sync-{round_}", arguments.policy, 0, arguments.sync_steps, arguments.tool_in)
        rates["synchronous"].append(groups_per_s(steps, arguments.warmup, 0))
    ratios = [a / s for a, s in zip(rates["asynchronous"], rates["synchronous"], strict=True)]
    step_s, slowest_s = median(trainer_s), expected_slowest_s(arguments.sync_steps, arguments.tool_in)
    for side, values in rates.items():
        console.print(
            f"{side:13} {median(values):6.2f} groups/s  (n = {len(values)}: {', '.join(f'{v:.2f}' for v in values)})"
        )
    console.print(f"ratio {median(ratios):.2f}  ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    console.print(
        f"limit {(step_s + slowest_s) / step_s:.1f}: trainer's step {step_s:.2f} s (median of {len(trainer_s)}), "
        f"slowest of {BATCH * GROUP} tool calls {slowest_s:.2f} s on average"
    )
    if busy:
        console.print(f"environments busy {median(busy):.2f} of the time that they were open (median of {len(busy)})")


if __name__ == "__main__":
    main()
