"""Two policies in one run train on each other's attempts. What they learn: tests/integration/test_training_runs.py."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.platform.metrics.trajectory_table import read_trajectories
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from tests.command_line import read_metric, read_summary
from tests.small_run import MAX_CONTEXT_TOKENS, TWO_ROUTES, Train, small_run_overrides
from tests.tiny_policy import tiny_shape

STEPS, GROUPS = 3, 4


@TWO_ROUTES
def test_each_trains_on_what_both_have_sampled_and_is_saved(train: Train, tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    shape = tiny_shape(vocab_size=len(tokenizer), hidden_size=48, head_dim=16)
    partner = ModelConfig(max_context_tokens=MAX_CONTEXT_TOKENS, shape=shape)
    create_policy(partner, tokenizer, str(tmp_path / "other"), seed=1)
    _, *overrides = small_run_overrides(tmp_path, "two", tokenizer, f"dataflow.batch_groups={GROUPS}")
    of_partner = [
        "partner.model.path=other",
        f"partner.model.max_context_tokens={MAX_CONTEXT_TOKENS}",
    ]
    reward = "reward.fn=long_answers:longer"
    (tmp_path / "long_answers.py").write_text(
        "def longer(trajectory, **_):\n    return len(set(trajectory.response)) / 12\n"
    )
    train(
        tmp_path,
        [
            "experiment=arithmetic_two_policies",
            *overrides,
            *of_partner,
            reward,
            f"total_steps={STEPS}",
            "evaluation.temperature=1.0",
        ],
    )
    run_dir = tmp_path / "runs" / "two"
    summary = read_summary(run_dir)
    assert (summary["ledger"]["trained"], summary["ledger"]["failed"]) == (STEPS * GROUPS, 0)
    own = read_metric(run_dir, "ratio/staleness_tokens/0")
    others = read_metric(run_dir, "ratio/staleness_tokens/other_policy")
    assert own[0] > 0 < others[0]
    assert read_metric(run_dir, "mismatch/abs_logprob_max")[0] < 1e-4, "of own tokens only"
    assert read_metric(run_dir, "partner/mismatch/abs_logprob_max")[0] < 1e-4
    for policy, size in (("policy", 32), ("partner", 48)):
        assert json.loads((run_dir / policy / "config.json").read_text())["hidden_size"] == size
    answers = [
        read_trajectories(run_dir / "evaluations" / name / f"step_{STEPS:06d}.parquet") for name in ("", "partner")
    ]
    assert [len(rows) for rows in answers] == [1, 1]
    assert answers[0][0]["response"] != answers[1][0]["response"], "each policy's own"
