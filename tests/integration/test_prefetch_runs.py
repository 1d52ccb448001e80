"""Real ranks, engines and rewards: groups are forwarded while their batch is awaited, on partitioned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.rollout.tokenizers import character_tokenizer
from tests.command_line import fresh_mismatches, read_metric, read_summary
from tests.small_run import small_run

pytestmark = [pytest.mark.integration, pytest.mark.full]

SLOW_REWARD = """
import asyncio

async def later(trajectory, **_):
    \"\"\"Group after group is ready, a tenth of a second apart.\"\"\"
    await asyncio.sleep(0.1 * (int(trajectory.task_id.rpartition("/")[2]) % 4))
    return float(trajectory.trajectory_id.endswith("1"))
"""
STEPS = 3


@pytest.fixture
def run(tmp_path: Path):
    (tmp_path / "late.py").write_text(SLOW_REWARD)

    def train(name: str, *overrides: str) -> Path:
        settings: tuple[Any, ...] = (
            "algorithm=ppo", "reward.fn=late:later", "dataflow.batch_groups=4", f"total_steps={STEPS}", *overrides
        )  # fmt: skip
        return small_run(tmp_path, name, character_tokenizer(), *settings)

    return train


def test_ranks_that_wait_for_a_batch_forward_its_groups(run) -> None:
    folder = run("ahead", "trainer.backend=deepspeed", "trainer.num_ranks=2", "trainer.zero_stage=3")
    assert read_summary(folder)["trained_groups"] == 4 * STEPS
    shares = read_metric(folder, "trainer/prefetched_token_share")
    assert len(shares) == STEPS
    assert shares[0] > 0, "the first batch is awaited"
    assert max(shares) <= 1
    assert read_metric(folder, "trainer/prefetch_used_s")[0] > 0
    assert all(value < 1e-4 for value in fresh_mismatches(folder)), "proximal logprobs are those of the step's weights"


@pytest.mark.full
def test_and_do_not_where_it_is_switched_off(run) -> None:
    folder = run("off", "dataflow.prefetch=false")
    assert read_metric(folder, "trainer/prefetched_token_share") == [0.0] * STEPS
