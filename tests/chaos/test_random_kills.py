"""Processes of a run are killed or stopped at random moments: nothing is lost, and nothing is trained twice.

Five kills by every `make test`; by `make test-full` 36 in six runs, over both engines, one and two trainer ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import run_cli

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(2000)]

TORCH, VLLM = ("rollout/engine=torch",), ("rollout/engine=vllm",)
RANKS = ("trainer.num_ranks=2", "trainer.zero_stage=2", "cluster.pools.cpu.count=4")


@pytest.mark.parametrize(
    ("seed", "kills", "overrides"),
    [
        # One of each kind: driver, engine, reward worker, the process of the reward, trainer rank.
        pytest.param(314, 5, TORCH, id="each_kind_once"),
        *(
            pytest.param(seed, 6, overrides, id=f"seed{seed}", marks=pytest.mark.full)
            for seed, overrides in enumerate([TORCH, VLLM, (*TORCH, *RANKS), VLLM, TORCH, (*VLLM, *RANKS)])
        ),
    ],
)
def test_a_run_survives_random_kills(
    seed: int, kills: int, overrides: tuple[str, ...], workspace: Path, train_overrides: list[str]
) -> None:
    name = f"chaos_{seed}_{kills}"
    few = ("evaluation.num_tasks=64", "evaluation.every_steps=0", "dataflow.batch_groups=8", "total_steps=100")
    arguments = (*train_overrides, *overrides, *few, f"name={name}", "--kills", str(kills), "--seed", str(seed))
    done = run_cli("chaos", *arguments, cwd=workspace, timeout_s=1900)
    log = workspace / "runs" / f"{name}.chaos.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    assert f"{kills} kills" in done.stdout
    assert "each once" in done.stdout
