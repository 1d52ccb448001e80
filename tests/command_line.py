"""Running the real `penstock` command as a user would, and reading its output files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def run_cli(*arguments: str, cwd: Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `penstock ...` in `cwd` and return it with its output."""
    return subprocess.run(
        [PENSTOCK, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def read_summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def read_metric(run_dir: Path, name: str) -> list[float]:
    """All values logged under `name`, in order."""
    records = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def fresh_mismatches(run_dir: Path) -> list[float]:
    """Largest |proximal − behavior| in nat of each step whose tokens were all sampled by the trained version.

    In float32 it is rounding, below 1e-4, unless the trainer sees other tokens than the engine.
    """
    staleness = read_metric(run_dir, "staleness/max_versions")
    mismatches = read_metric(run_dir, "mismatch/abs_logprob_max")
    return [value for value, versions in zip(mismatches, staleness, strict=True) if versions == 0]
