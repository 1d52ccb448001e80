"""Main memory of whole runs on a CPU beside what `--dry-run` estimates for them.

    python benchmarks/memory_of_runs.py [--rounds 3]     (20 minutes; writes benchmarks/results/memory_of_runs.md)

The demo, warm start included, and variants of it train some steps. Measured is the peak of `memory/pss_gib`, the
proportional set sizes of the driver and all its processes, Ray's daemons included. A page that several processes map
is divided by their number, so a library that another program on the machine uses too counts for less: run this alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from alone import BENCH, run_alone
from provenance import provenance

from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.placement import host_load_gib, plan_placement

RESULT = Path(__file__).parent / "results" / "memory_of_runs.md"
PENSTOCK = Path(sys.executable).with_name("penstock")
TIMEOUT_S = 600.0
WARM, RUN = BENCH / "memory-warm", BENCH / "memory-run"
TAKES_TURNS = ["cluster.colocated=true", "dataflow.max_staleness=0"]
CASES = {
    "the demo": [],
    "colocated": TAKES_TURNS,
    "two ranks with ZeRO-3, two engines": ["trainer.num_ranks=2", "trainer.zero_stage=3", "rollout.num_engines=2"],
    "the torch engine": ["rollout/engine=torch"],
    "PPO with a critic": ["algorithm=ppo"],
    "adapters": ["trainer=lora"],
}


def overrides(case: list[str]) -> list[str]:
    return [
        "experiment=arithmetic",
        f"model.path={WARM}/policy",
        f"run_dir={RUN}",
        "overwrite=true",
        "total_steps=12",
        "evaluation.every_steps=6",
        *case,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    others = [
        run_alone(
            "memory-sft", [PENSTOCK, "sft", "experiment=arithmetic_sft", f"run_dir={WARM}", "overwrite=true"], TIMEOUT_S
        )
    ]
    peaks: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, case in CASES.items():
            others.append(run_alone("memory-run", [PENSTOCK, "train", *overrides(case)], TIMEOUT_S))
            peaks[name].append(json.loads((RUN / "summary.json").read_text())["peak_memory_gib"])
            print(f"{name}: {peaks[name][-1]:.2f} GiB", flush=True)
    lines = ["# Main memory of runs: estimate and measured", "", "| run | measured GiB | estimate | ÷ median |"]
    lines.append("|" + " --- |" * 4)
    for name, case in CASES.items():
        found, planned = peaks[name], host_load_gib(plan_placement(compose_config(overrides(case)), "train"))
        spread = f"{median(found):.2f} ({min(found):.2f} … {max(found):.2f})"
        lines.append(f"| {name} | {spread} | {planned:.2f} | {planned / median(found):.2f} |")
    notes = [*provenance(), f"n = {rounds}, median and range; others had up to {max(others):.0f} % of the cores"]
    lines += ["", *(f"- {note}" for note in [*notes, "by: python benchmarks/memory_of_runs.py"])]
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
