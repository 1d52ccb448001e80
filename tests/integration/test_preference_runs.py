"""`penstock rm` through the command line, from a policy of random weights. For `dpo` see test_training_runs.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.platform.checks.load import compose_config
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.models.value_model import load_value_model
from tests.command_line import read_metric, run_cli

pytestmark = [pytest.mark.integration, pytest.mark.full]

SHORT = ["preference.num_steps=3", "preference.batch_size=8", "preference.eval_pairs=16", "trainer.backend=torch"]


def test_pairs_train_a_reward_model_that_is_written_with_its_tokenizer(tmp_path: Path) -> None:
    model = compose_config(["experiment=arithmetic_preference"], command="rm").model
    create_policy(model, character_tokenizer(), str(tmp_path / "start"), seed=0)
    overrides = ["experiment=arithmetic_preference", f"model.path={tmp_path / 'start'}", "name=pairs", *SHORT]
    done = run_cli("rm", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "runs" / "pairs"
    losses = read_metric(run_dir, "preference/loss")
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5), "it prefers nothing yet"
    assert len(losses) == 3
    assert 0 <= read_metric(run_dir, "preference/accuracy")[-1] <= 1
    written = run_dir / "reward_model"
    assert (written / "tokenizer.json").read_bytes() == (tmp_path / "start" / "tokenizer.json").read_bytes()
    (architecture,) = json.loads((written / "config.json").read_text())["architectures"]
    assert architecture == "Qwen3ForSequenceClassification"
    head = load_value_model(str(written), model, gradient_checkpointing=False).classifier.score.weight
    assert float(head.abs().max()) > 0, "a critic that starts from it must not start again"
