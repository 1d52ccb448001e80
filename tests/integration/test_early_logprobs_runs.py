"""Groups are forwarded while their batch is awaited; with real ranks on partitioned weights too."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import fresh_mismatches, read_metric, read_summary
from tests.in_process import train_in_process
from tests.small_run import TWO_ROUTES, Train, small_run, train_by_command

SLOW_REWARD = """
import asyncio

async def later(trajectory, **_):
    \"\"\"Group after group is ready, a tenth of a second apart.\"\"\"
    await asyncio.sleep(0.1 * (int(trajectory.task_id.rpartition("/")[2]) % 4))
    return float(trajectory.trajectory_id.endswith("1"))
"""
STEPS = 3


def run(train: Train, folder: Path, *overrides: str) -> Path:
    (folder / "late.py").write_text(SLOW_REWARD)
    settings = ("algorithm=ppo", "reward.fn=late:later", "dataflow.batch_groups=4", f"total_steps={STEPS}", *overrides)
    return small_run(train, folder, "ahead", character_tokenizer(), *settings)


@pytest.mark.full
@pytest.mark.parametrize(
    ("train", "overrides"),
    [
        pytest.param(train_in_process, [], id="in_process"),
        pytest.param(
            train_by_command,
            ["trainer.backend=deepspeed", "trainer.num_ranks=2", "trainer.zero_stage=3"],
            id="two_ranks_of_zero3",
            marks=[pytest.mark.integration, pytest.mark.full],
        ),
    ],
)
def test_a_trainer_that_waits_for_a_batch_forwards_its_groups(
    train: Train, overrides: list[str], tmp_path: Path
) -> None:
    folder = run(train, tmp_path, *overrides)
    assert read_summary(folder)["trained_groups"] == 4 * STEPS
    shares = read_metric(folder, "trainer/early_logprobs_token_share")
    assert len(shares) == STEPS
    assert shares[0] > 0, "the first batch is awaited"
    assert max(shares) <= 1
    assert read_metric(folder, "trainer/early_logprobs_used_s")[0] > 0
    assert all(value < 1e-4 for value in fresh_mismatches(folder)), "proximal logprobs are those of the step's weights"


@pytest.mark.full
@TWO_ROUTES
def test_and_does_not_where_it_is_switched_off(train: Train, tmp_path: Path) -> None:
    folder = run(train, tmp_path, "dataflow.early_logprobs=false")
    assert read_metric(folder, "trainer/early_logprobs_token_share") == [0.0] * STEPS
