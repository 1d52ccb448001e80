"""An agent program that calls the policy itself trains from config alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.chat_tokenizers import chat_tokenizer
from tests.command_line import fresh_mismatches, read_metric, read_summary
from tests.small_run import TWO_ROUTES, Train, small_run, small_run_overrides, train_by_command
from tests.tiers import by_tier

AGENT = Path(__file__).parents[2] / "examples" / "own_agent.py"
STEPS = by_tier(1, 3)


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
        f"total_steps={STEPS}",
    ]
    run_dir = small_run(train, tmp_path, "agent", chat_tokenizer("chatml"), *overrides)
    assert read_summary(run_dir)["ledger"]["trained"] == STEPS
    assert read_metric(run_dir, "env/turns") == [2.0] * STEPS
    assert read_metric(run_dir, "env/done_share") == [1.0] * STEPS
    assert read_metric(run_dir, "env/count/requests") == [2.0] * STEPS
    assert all(tokens > 0 for tokens in read_metric(run_dir, "env/observation_tokens"))
    # Behavior logprobs of every turn are those of the trainer at the same version: nothing was re-tokenised.
    assert len(mismatches := fresh_mismatches(run_dir)) == STEPS
    assert max(mismatches) < 1e-4
    assert any(pq.read_table(table).num_rows for table in sorted(run_dir.rglob("*.parquet")))


TOOLS_AGENT = """
SCHEMA = {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}

async def solve(task, client):
    messages = [{"role": "user", "content": task.prompt}]
    for stream in (False, True):
        asked = dict(model="policy", messages=messages, tools=[TOOL], max_tokens=8, stream=stream)
        answer = await client.chat.completions.create(**asked)
        if stream:
            text = "".join([part.choices[0].delta.content or "" async for part in answer if part.choices])
        else:
            messages += [answer.choices[0].message, {"role": "user", "content": "Again."}]
    return float(len(text) > 0)
"""


@pytest.mark.integration
@pytest.mark.full
def test_turns_of_an_agent_are_read_by_a_parser_in_the_engines(tmp_path: Path) -> None:
    """pythonic is a parser of vLLM only: an engine has to read every turn."""
    (tmp_path / "tool_agent.py").write_text(TOOLS_AGENT)
    overrides = [
        "env=agent",
        "reward=episode",
        "env.args.tasks=arithmetic",
        "env.args.agent=tool_agent:solve",
        "env.tool_calls=pythonic",
        "rollout/engine=vllm",
        "rollout.num_engines=2",
        "total_steps=2",
    ]
    given = small_run_overrides(tmp_path, "tools", chat_tokenizer("chatml"), *overrides, head_dim=32)
    train_by_command(tmp_path, given)
    run_dir = tmp_path / "runs" / "tools"
    summary = read_summary(run_dir)
    assert (summary["ledger"]["trained"], summary["ledger"]["failed"]) == (2, 0)
    assert read_metric(run_dir, "env/turns") == [2.0] * 2
    assert max(read_metric(run_dir, "reward/mean")) > 0, "streamed text that is no call is delivered"
