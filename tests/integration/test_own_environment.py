"""A user's multi-turn environment and reward, outside the package, train with config only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from tests.command_line import fresh_mismatches, read_metric, read_summary
from tests.small_run import TWO_ROUTES, Train
from tests.tiny_policy import tiny_shape

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = tiny_shape(vocab_size=32, hidden_size=64, head_dim=32)


@pytest.fixture(scope="module")
def random_policy(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A policy that knows nothing, and the overrides that describe it."""
    folder = tmp_path_factory.mktemp("policy")
    create_policy(ModelConfig(max_context_tokens=128, shape=SHAPE), character_tokenizer(), str(folder), seed=0)
    return [f"model.path={folder}", "model.max_context_tokens=128"]


def code_lines(path: Path) -> int:
    return sum(bool(line.strip()) and not line.startswith('"""') for line in path.read_text().splitlines())


def test_the_examples_are_short() -> None:
    assert code_lines(EXAMPLES / "own_environment.py") <= 30
    assert code_lines(EXAMPLES / "own_reward.py") <= 5


@TWO_ROUTES
def test_a_users_environment_and_reward_train(train: Train, tmp_path: Path, random_policy: list[str]) -> None:
    for name in ("own_environment.py", "own_reward.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    overrides = [
        "experiment=arithmetic",
        "env.episode.max_turns=12",
        "env.factory=own_environment:HotOrCold",
        "~env.args",
        "reward=episode",
        "reward.fn=own_reward.quick",
        "rollout/engine=torch",
        "rollout.sampling.max_new_tokens=12",
        "trainer.backend=torch",
        "dataflow.batch_groups=8",
        "total_steps=4",
        "evaluation.num_tasks=16",
        "name=own",
        *random_policy,
    ]
    train(tmp_path, overrides)
    run_dir = tmp_path / "runs" / "own"
    assert read_summary(run_dir)["ledger"]["trained"] == 32
    assert read_summary(run_dir)["ledger"]["failed"] == 0
    assert all(norm > 0 for norm in read_metric(run_dir, "loss/grad_norm"))
    assert all(1 < turns <= 3 for turns in read_metric(run_dir, "env/turns"))
    assert all(misses > 0 for misses in read_metric(run_dir, "env/count/misses"))
    assert all(share > 0.9 for share in read_metric(run_dir, "env/done_share"))
    assert all(0 < share <= 1 for share in read_metric(run_dir, "env/utilisation"))
    assert min(read_metric(run_dir, "env/opened")) >= 8
    # Behavior logprobs of every turn are those of the trainer at the same version: nothing was re-tokenised.
    assert max(fresh_mismatches(run_dir)) < 1e-4
    tables = sorted(run_dir.rglob("*.parquet"))
    assert any(pq.read_table(table).num_rows for table in tables)
