"""A warm-started tiny policy, made once per session by the real `penstock sft`, and a way to run the real CLI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the repository, as a user would have."""
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="session")
def warm_policy(workspace: Path) -> Path:
    """Two-digit sums, stopped half-way up."""
    done = run_cli(
        "sft",
        "experiment=arithmetic_sft",
        "env.args.digits=2",
        "sft.stop_at_accuracy=0.2",
        "name=warm",
        cwd=workspace,
        timeout_s=280,
    )
    assert done.returncode == 0, done.stderr
    return workspace / "runs" / "warm" / "policy"


@pytest.fixture(scope="session")
def train_overrides(warm_policy: Path) -> list[str]:
    """Overrides that make the demo small; tests add theirs behind."""
    return [
        "experiment=arithmetic",
        "env.args.digits=2",
        f"model.path={warm_policy}",
        "evaluation.num_tasks=256",
        "evaluation.every_steps=0",
    ]
