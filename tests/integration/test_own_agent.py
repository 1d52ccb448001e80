"""What asks the policy itself trains from config alone: an agent program, an environment of verifiers."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.rollout.tokenizers import byte_tokenizer
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


VERIFIERS = """
import verifiers as vf
from datasets import Dataset

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state):
        return [{"role": "user", "content": "Again."}]

def long(completion):
    return len(completion[0]["content"]) / 12

def load_environment(num_rows):
    rows = [{"question": f"{n}?", "answer": ""} for n in range(num_rows)]
    return Again(dataset=Dataset.from_list(rows), rubric=vf.Rubric([long]), max_turns=2)
"""


def small_run(folder: Path, name: str, tokenizer: Any, *overrides: str) -> Path:
    """Train a policy that knows nothing, in `folder`, with two members a group and two turns each."""
    shape = tiny_shape(vocab_size=len(tokenizer), hidden_size=32, head_dim=16)
    create_policy(ModelConfig(max_context_tokens=256, shape=shape), tokenizer, str(folder / "policy"), seed=0)
    done = run_cli(
        "train",
        "experiment=arithmetic",
        "reward=episode",
        "rollout/engine=torch",
        "rollout.sampling.max_new_tokens=12",
        "trainer.backend=torch",
        "dataflow.batch_groups=1",
        "dataflow.group_size=2",
        "evaluation.num_tasks=1",
        "evaluation.every_steps=0",
        f"name={name}",
        "model.path=policy",
        "model.max_context_tokens=256",
        *(f"model.shape.{key}={str(value).lower()}" for key, value in shape.model_dump().items()),
        *overrides,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = folder / "runs" / name
    assert read_summary(run_dir)["ledger"]["failed"] == 0
    return run_dir


def test_a_users_agent_program_trains(tmp_path: Path) -> None:
    shutil.copy(AGENT, tmp_path)
    agent = f"env.args.agent=[{sys.executable},own_agent.py]"
    overrides = ["env=agent", "env.args.tasks=own_agent:Codes", agent, "dataflow.max_staleness=0", "total_steps=3"]
    run_dir = small_run(tmp_path, "agent", chat_tokenizer("chatml"), *overrides)
    assert read_summary(run_dir)["ledger"]["trained"] == 3
    assert read_metric(run_dir, "env/turns") == [2.0] * 3
    assert read_metric(run_dir, "env/done_share") == [1.0] * 3
    assert read_metric(run_dir, "env/count/requests") == [2.0] * 3
    assert all(tokens > 0 for tokens in read_metric(run_dir, "env/observation_tokens"))
    # Behavior logprobs of every turn are those of the trainer at the same version: nothing was re-tokenised.
    assert read_metric(run_dir, "mismatch/abs_logprob_max")[0] < 1e-3
    assert any(pq.read_table(table).num_rows for table in sorted(run_dir.rglob("*.parquet")))


def test_an_environment_of_verifiers_trains(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(VERIFIERS)
    overrides = ["env=verifiers", "env.args.id=again", "env.args.kwargs.num_rows=64", "total_steps=10"]
    run_dir = small_run(tmp_path, "verifiers", byte_tokenizer(), *overrides)
    assert read_summary(run_dir)["ledger"]["trained"] == 10
    assert all(0 < turns <= 2 for turns in read_metric(run_dir, "env/turns"))
    assert len(read_metric(run_dir, "reward/part/long")) == 10
    assert read_metric(run_dir, "mismatch/abs_logprob_max")[0] < 1e-3
