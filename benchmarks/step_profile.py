"""CPU seconds of one step of the demo, by process: where the work of a step is, and how much TRL has for its own.

    python benchmarks/step_profile.py [--steps 20] [--threads] [--trl] [override ...]       (2 to 4 minutes)

Runs `experiment=arithmetic` as vs_trl.py does, without evaluations, and reads user + system time of every process of
the run whenever `metrics.jsonl` has `--block` more steps. CPU seconds depend little on what else the machine does, wall
seconds much. The first `--warmup` steps are left out, and the last max_staleness + 1, whose generation has ended. A row
is the mean over all measured steps, and the lowest and highest mean of a block. A step on c cores takes at least 1/c of
the sum.

`--trl` adds the one process of TRL's `GRPOTrainer` with the settings that vs_trl.py found fastest on two cores.
Overrides are added to the command line of the run: `rollout.engine.max_num_seqs=128`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean

import psutil
from alone import BENCH, ROOT, end
from provenance import provenance
from vs_trl import PENSTOCK, run_trl, trl_python, trl_spec

from penstock.platform.checks.load import compose_config

POLL_S = 0.02
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROLES = {
    "TrainerRank": "trainer rank",
    "EngineCore": "engine: core of vLLM",
    "EngineActor": "engine: actor and AsyncLLM",
    "RewardActor": "reward worker and its child",
    "envs/workers": "reward worker and its child",
    "penstock.envs.workers": "reward worker and its child",
}
"""What a command line contains -> the row of its process."""
Usage = dict[tuple[str, str], float]
"""(row, name of the thread) -> CPU seconds since the process began."""


def usage(driver: int) -> Usage:
    """CPU seconds of all processes that the driver has started, Ray's daemons included."""
    found: Usage = defaultdict(float)
    for process in (psutil.Process(driver), *psutil.Process(driver).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            title = " ".join(process.cmdline()) or process.name()
            row = next((row for word, row in ROLES.items() if word in title), "Ray's daemons, idle workers")
            row = "driver" if process.pid == driver else row
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                name, _, fields = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
                user, system = fields.split()[11:13]
                found[row, name] += (int(user) + int(system)) / TICKS_PER_S
    return dict(found)


@contextmanager
def demo(name: str, num_steps: int, overrides: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The demo without its evaluations: its driver, and the file with its metrics."""
    run_dir = BENCH / name
    (BENCH / "logs").mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [PENSTOCK, "train", "experiment=arithmetic", f"name={name}", f"run_dir={run_dir}"]
    command += ["overwrite=true", f"total_steps={num_steps}", "evaluation.every_steps=0", "evaluation.num_tasks=1"]
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    with (BENCH / "logs" / f"{name}.log").open("w") as log:
        process = subprocess.Popen([*command, *overrides], cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process, run_dir / "metrics.jsonl"
    finally:
        end(process)


def steps_in(metrics: Path) -> list[dict[str, float]]:
    """Metrics of the steps so far."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    found = (json.loads(line)["metrics"] for line in lines if line.endswith("\n"))
    return [one for one in found if "throughput/step_s" in one]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--block", type=int, default=5, help="steps between two readings")
    parser.add_argument("--warmup", type=int, default=5, help="steps that are left out first")
    parser.add_argument("--threads", action="store_true", help="also list the threads above 5 ms per step")
    parser.add_argument("--trl", action="store_true", help="also measure TRL; its environment is made the first time")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="longest time for a run")
    parser.add_argument("overrides", nargs="*", help="further overrides of the run")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    overrides, block, warmup = arguments.overrides, arguments.block, arguments.warmup
    config = compose_config(["experiment=arithmetic", *overrides])
    drain = config.dataflow.max_staleness + 1
    readings: list[tuple[float, Usage]] = []
    deadline = time.monotonic() + arguments.timeout_s
    with demo("step-profile", warmup + arguments.steps + drain, overrides) as (driver, metrics):
        while len(readings) <= arguments.steps // block:
            if driver.poll() is not None or time.monotonic() > deadline:
                log = (BENCH / "logs" / "step-profile.log").read_text().splitlines()
                raise SystemExit("\n".join(["the run ended or took too long. The end of its log:", *log[-20:]]))
            if len(steps_in(metrics)) >= warmup + block * len(readings):
                readings.append((time.monotonic(), usage(driver.pid)))
            time.sleep(POLL_S)
        steps = steps_in(metrics)[warmup : warmup + arguments.steps]
    report(readings, steps, block, is_by_thread=arguments.threads)
    if arguments.trl:
        spec = trl_spec(config, str(config.model.path), warmup + arguments.steps) | {"micro_batch": 128}
        run = run_trl("trl-profile", trl_python(), spec, arguments.timeout_s).kept(warmup, arguments.steps)
        print(row_of("TRL, for comparison", [mean(run.cpu_s[i : i + block]) for i in range(0, len(run.cpu_s), block)]))
        print(f"\n- TRL: {mean(run.step_s):.3f} s and {mean(run.num_tokens):.0f} tokens per step")


def row_of(name: str, blocks: list[float]) -> str:
    return f"| {name} | {mean(blocks):.3f} | {min(blocks):.3f} … {max(blocks):.3f} |"


def report(
    readings: list[tuple[float, Usage]], steps: list[dict[str, float]], block: int, *, is_by_thread: bool
) -> None:
    def blocks(rows: set[tuple[str, str]]) -> list[float]:
        """CPU seconds per step of these rows, in each block."""
        return [
            sum(after[row] - before.get(row, 0.0) for row in rows if row in after) / block
            for (_, before), (_, after) in pairwise(readings)
        ]

    known = set().union(*(found for _, found in readings))
    wall_s = (readings[-1][0] - readings[0][0]) / (block * (len(readings) - 1))
    tokens = mean(one["throughput/trained_tokens_per_s"] * one["throughput/step_s"] for one in steps)
    print(*(f"- {fact}" for fact in provenance()), sep="\n")
    print(f"- n = {len(steps)} steps, blocks of {block}; {wall_s:.3f} s and {tokens:.0f} tokens per step\n")
    print("| process | CPU s per step | blocks |", "| --- | --- | --- |", sep="\n")
    for role in sorted({role for role, _ in known}):
        rows = {row for row in known if row[0] == role}
        print(row_of(role, blocks(rows)))
        for row in sorted(rows) if is_by_thread else ():
            if mean(of_thread := blocks({row})) > 0.005:
                print(row_of(f"&nbsp;&nbsp;thread {row[1]}", of_thread))
    print(row_of("all", blocks(known)))


if __name__ == "__main__":
    main()
