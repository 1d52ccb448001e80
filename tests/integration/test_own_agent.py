"""An agent program that calls the policy itself trains from config alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq

from tests.chat_tokenizers import chat_tokenizer
from tests.command_line import fresh_mismatches, read_metric, read_summary
from tests.small_run import TWO_ROUTES, Train, small_run

AGENT = Path(__file__).parents[2] / "examples" / "own_agent.py"


def test_the_example_is_short() -> None:
    lines = [line for line in AGENT.read_text().splitlines() if line.strip() and not line.startswith('"""')]
    assert len(lines) <= 30


@TWO_ROUTES
def test_a_users_agent_program_trains(train: Train, tmp_path: Path) -> None:
    shutil.copy(AGENT, tmp_path)
    agent = f"env.args.agent=[{sys.executable},own_agent.py]"
    overrides = [
        "env=agent",
        "reward=episode",
        "env.args.tasks=own_agent:Codes",
        agent,
        "dataflow.max_staleness=0",
        "total_steps=3",
    ]
    run_dir = small_run(train, tmp_path, "agent", chat_tokenizer("chatml"), *overrides)
    assert read_summary(run_dir)["ledger"]["trained"] == 3
    assert read_metric(run_dir, "env/turns") == [2.0] * 3
    assert read_metric(run_dir, "env/done_share") == [1.0] * 3
    assert read_metric(run_dir, "env/count/requests") == [2.0] * 3
    assert all(tokens > 0 for tokens in read_metric(run_dir, "env/observation_tokens"))
    # Behavior logprobs of every turn are those of the trainer at the same version: nothing was re-tokenised.
    assert len(mismatches := fresh_mismatches(run_dir)) == 3
    assert max(mismatches) < 1e-4
    assert any(pq.read_table(table).num_rows for table in sorted(run_dir.rglob("*.parquet")))
