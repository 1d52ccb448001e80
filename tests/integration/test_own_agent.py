"""A user's agent program, outside the package and in its own process, trains from the command line with config only."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.trainer.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from tests.chat_tokenizers import chat_tokenizer
from tests.command_line import read_metric, read_summary, run_cli
from tests.tiny_policy import tiny_shape

pytestmark = pytest.mark.integration

AGENT = Path(__file__).parents[2] / "examples" / "own_agent.py"


def test_the_example_is_short() -> None:
    lines = [line for line in AGENT.read_text().splitlines() if line.strip() and not line.startswith('"""')]
    assert len(lines) <= 30


def test_a_users_agent_program_trains(tmp_path: Path) -> None:
    shutil.copy(AGENT, tmp_path)
    tokenizer = chat_tokenizer("chatml")
    shape = tiny_shape(vocab_size=len(tokenizer), hidden_size=32, head_dim=16)
    create_policy(ModelConfig(max_context_tokens=256, shape=shape), tokenizer, str(tmp_path / "policy"), seed=0)
    done = run_cli(
        "train",
        "experiment=arithmetic",
        "env=agent",
        "env.args.tasks=own_agent:Codes",
        f"env.args.agent=[{sys.executable},own_agent.py]",
        "reward=episode",
        "rollout/engine=torch",
        "rollout.sampling.max_new_tokens=12",
        "trainer.backend=torch",
        "dataflow.batch_groups=1",
        "dataflow.group_size=2",
        "dataflow.max_staleness=0",
        "total_steps=3",
        "evaluation.num_tasks=1",
        "evaluation.every_steps=0",
        "name=agent",
        "model.path=policy",
        "model.max_context_tokens=256",
        *(f"model.shape.{name}={str(value).lower()}" for name, value in shape.model_dump().items()),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "agent"
    assert read_summary(run_dir)["ledger"]["trained"] == 3
    assert read_summary(run_dir)["ledger"]["failed"] == 0
    assert read_metric(run_dir, "env/turns") == [2.0] * 3
    assert read_metric(run_dir, "env/done_share") == [1.0] * 3
    assert read_metric(run_dir, "env/count/requests") == [2.0] * 3
    assert all(tokens > 0 for tokens in read_metric(run_dir, "env/observation_tokens"))
    # Behavior logprobs of every turn are those of the trainer at the same version: nothing was re-tokenised.
    assert read_metric(run_dir, "mismatch/abs_logprob_max")[0] < 1e-3
    assert any(pq.read_table(table).num_rows for table in sorted(run_dir.rglob("*.parquet")))
