"""Environments of other libraries train for ten steps from config alone: verifiers, reasoning-gym, gymnasium."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.rollout.tokenization.tokenizers import byte_tokenizer
from tests.command_line import fresh_mismatches, read_metric, read_summary
from tests.small_run import TWO_ROUTES, Train, small_run

STEPS = 10
TEN_STEPS = f"total_steps={STEPS}"
FRESH = "dataflow.max_staleness=0"

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


@pytest.mark.full
@TWO_ROUTES
def test_an_environment_of_verifiers_trains(train: Train, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(VERIFIERS)
    overrides = ["env=verifiers", "env.args.id=again", "env.args.kwargs.num_rows=64", "reward=episode"]
    run_dir = small_run(train, tmp_path, "verifiers", byte_tokenizer(), TEN_STEPS, *overrides)
    assert read_summary(run_dir)["ledger"]["trained"] == STEPS
    assert all(0 < turns <= 2 for turns in read_metric(run_dir, "env/turns"))
    assert len(read_metric(run_dir, "reward/part/long")) == STEPS
    assert max(fresh_mismatches(run_dir)) < 1e-4


@pytest.mark.full
@TWO_ROUTES
def test_two_datasets_of_reasoning_gym_train(train: Train, tmp_path: Path) -> None:
    datasets = ["env.args.dataset=chain_sum", "+env.streams={sums: {}, legs: {args: {dataset: leg_counting}}}"]
    overrides = ["env=reasoning_gym", *datasets, "reward=reasoning_gym"]
    run_dir = small_run(train, tmp_path, "reasoning_gym", byte_tokenizer(), TEN_STEPS, FRESH, *overrides)
    assert read_summary(run_dir)["ledger"]["trained"] == STEPS
    assert read_metric(run_dir, "reward/part/verifier_error") == [0.0] * STEPS
    assert len(mismatches := fresh_mismatches(run_dir)) == STEPS
    assert max(mismatches) < 1e-4


@pytest.mark.full
@TWO_ROUTES
def test_an_environment_of_gymnasium_trains(train: Train, tmp_path: Path) -> None:
    actions = "env.args.action_names=[s, n, e, w, p, d]"
    overrides = ["env=gymnasium", "env.args.id=Taxi-v4", actions, "env.episode.max_turns=3", "reward=episode"]
    run_dir = small_run(train, tmp_path, "gymnasium", byte_tokenizer(), TEN_STEPS, FRESH, *overrides)
    assert read_summary(run_dir)["ledger"]["trained"] == STEPS
    assert read_metric(run_dir, "env/turns") == [3.0] * STEPS
    assert min(read_metric(run_dir, "reward/mean")) < 0
    assert all(tokens > 0 for tokens in read_metric(run_dir, "env/observation_tokens"))
    assert len(mismatches := fresh_mismatches(run_dir)) == STEPS
    assert max(mismatches) < 1e-4
