"""Processes of a run are killed or stopped at random moments: nothing is lost, and nothing is trained twice.

Two kills by every `make test`; by `make test-full` 41 in seven more runs, over both engines, one and two trainer ranks,
two nodes, and an environment of several turns.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ENVIRONMENT

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(2000)]

ROOT = Path(__file__).parents[2]
TORCH, VLLM = ("rollout/engine=torch",), ("rollout/engine=vllm",)
RANKS = ("trainer.num_ranks=2", "trainer.zero_stage=2", "cluster.pools.cpu.count=4")
NODES = ("--nodes", "2")
GUESSING = ("env.args={high: 1000}", "env.factory=guessing:GuessingGame", "env.episode.max_turns=5", "reward=episode")
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
PAUSES, LONG = ("--longest-pause-s", "4"), ("total_steps=250",)


@pytest.mark.parametrize(
    ("seed", "kills", "overrides"),
    [
        pytest.param(3518, 2, (*TORCH, "total_steps=20", *PAUSES), id="an_engine_and_the_driver"),
        # One of each kind: driver, engine, reward worker, the process of the reward, trainer rank.
        pytest.param(314, 5, (*TORCH, "total_steps=60", *PAUSES), id="each_kind_once", marks=pytest.mark.full),
        *(
            pytest.param(seed, 6, (*overrides, *LONG), id=f"seed{seed}", marks=pytest.mark.full)
            for seed, overrides in {
                0: TORCH,
                1: VLLM,
                2: (*TORCH, *RANKS),
                3: (*VLLM, *NODES),
                5: (*VLLM, *RANKS),
                25: (*TORCH, *GUESSING),  # begins with environment hosts
            }.items()
        ),
    ],
)
def test_a_run_survives_random_kills(
    seed: int, kills: int, overrides: tuple[str, ...], workspace: Path, train_overrides: list[str]
) -> None:
    name, plays = f"chaos_{seed}_{kills}", "reward=episode" in overrides
    shutil.copy(ROOT / "examples" / "guessing.py", workspace)
    settings = [setting for setting in train_overrides if not (plays and setting.startswith("env.args."))]
    few = ("evaluation.num_tasks=64", "evaluation.every_steps=0", "dataflow.batch_groups=8", f"name={name}")
    program = [sys.executable, "-m", "tests.chaos.random_kills", "--kills", str(kills), "--seed", str(seed)]
    done = subprocess.run(
        [*program, *settings, *overrides, *few], cwd=workspace, env=ENVIRONMENT | {"PYTHONPATH": PYTHONPATH},
        capture_output=True, text=True, timeout=1900, check=False,
    )  # fmt: skip
    log = workspace / "runs" / f"{name}.chaos.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    print(done.stdout)
    assert f"{kills} kills" in done.stdout
    assert "each once" in done.stdout
    if not plays:  # as without faults: 0.7 after 60 steps, 0.95 after 200
        assert float(re.findall(r"-> ([\d.]+)", done.stdout)[-1]) > 0.5
