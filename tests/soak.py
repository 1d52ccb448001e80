"""What `make test-full` has no time for, in jobs: `python -m tests.soak 1/4` runs every fourth of them.

Every job that ends is a line of runs/soak.jsonl, with the commit it ran on. What has passed on this commit is not run
again, so that a part that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "runs" / "soak.jsonl"
BIN = Path(sys.executable).parent
SEEDS, SEEDS_OF_A_JOB = 10_000, 250
PYTEST = [str(BIN / "pytest"), "--timeout=7200", "-m"]


def jobs() -> dict[str, list[str]]:
    """Name -> command; the long ones first, so that parts take about as long as each other."""
    found = {
        "the RLHF chain": [*PYTEST, "soak", "tests/integration/test_rlhf_chain.py"],
        "2,000 publishes": [*PYTEST, "", "tests/contract/test_soak.py"],
        "odd values of every key": [*PYTEST, "soak", "tests/unit/platform/test_mutated_configurations.py"],
        "drawn models, data and machines": [*PYTEST, "soak", "tests/property/test_untouched_defaults.py"],
    }
    for start in range(0, SEEDS, SEEDS_OF_A_JOB):
        seeds = f"{start}:{start + SEEDS_OF_A_JOB}"
        found[f"fault seeds {seeds}"] = [sys.executable, "-m", "tests.simulation.configurations", seeds]
    return found


def commit() -> str:
    """Of the working tree; of one with changes no result counts later."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip() + ("-changed" if changes.stdout.strip() else "")


def passed(on: str, results: Path) -> set[str]:
    """Jobs that have passed on a commit."""
    if on.endswith("-changed") or not results.exists():
        return set()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["job"] for line in lines if line["commit"] == on and line["passed"]}


def run_part(
    part: str, all_jobs: dict[str, list[str]], on: str, results: Path = RESULTS, timeout_s: float = 7200
) -> list[str]:
    """Run the jobs of part `k/n` that have not passed; returns those that fail."""
    number, count = map(int, part.split("/"))
    if not 1 <= number <= count:
        raise SystemExit(f"PART={part}: there is no such part. Write k/n with 1 <= k <= n, e.g. PART=1/4.")
    results.parent.mkdir(parents=True, exist_ok=True)
    done, failed = passed(on, results), []
    for name in list(all_jobs)[number - 1 :: count]:
        if name in done:
            print(f"passed before: {name}", flush=True)
            continue
        print(f"{name} …", flush=True)
        started = time.monotonic()
        environment = os.environ | {"PENSTOCK_TESTS": "full", "SOAK_PUBLISHES": "2000"}
        try:
            code = subprocess.run(all_jobs[name], cwd=ROOT, env=environment, timeout=timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 124
        failed += [name] if code else []
        line = {"commit": on, "job": name, "passed": code == 0, "seconds": round(time.monotonic() - started, 1)}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return failed


if __name__ == "__main__":
    failures = run_part(sys.argv[1], jobs(), commit())
    sys.exit(f"failed: {'; '.join(failures)}" if failures else 0)
