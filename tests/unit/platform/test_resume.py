"""Which keys count as changed when a run is resumed, and what a damaged file of it leads to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.dataflow.errors import CheckpointError, ConfigError
from penstock.platform.checks.load import compose_config
from penstock.platform.config.compose import to_yaml
from penstock.platform.run import training
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.flow import FlowSnapshot
from penstock.platform.run.resume import changed_keys, resume, train
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.small_run import small_run_overrides


def test_of_the_keys_that_a_run_has_saved_only_those_that_differ_count_as_changed() -> None:
    saved = yaml.safe_load(to_yaml(compose_config(["experiment=arithmetic", "run_dir=runs/x"])))
    assert not list(changed_keys(saved, compose_config(["experiment=arithmetic", "run_dir=runs/x"])))
    other = compose_config(["experiment=arithmetic", "run_dir=runs/y", "algorithm.entropy.coefficient=0.1"])
    (changed,) = changed_keys(saved, other)
    assert changed.startswith("algorithm.entropy.coefficient=0.1: the run began with 0.0, ")


def test_a_damaged_summary_is_named_before_the_run_is_continued(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "summary.json").write_text('{"steps": 1')
    config = compose_config(["experiment=arithmetic", f"run_dir={tmp_path}", "resume=auto"])
    with pytest.raises(CheckpointError, match=r"summary\.json: it is damaged"):
        train(config)


@pytest.mark.parametrize(
    ("status", "evaluated_on", "eval_after", "is_left"),
    [
        ("completed", "held-out", None, True),
        ("completed", "held-out", 0.0, False),
        ("completed", None, None, False),  # a run without evaluations
        ("interrupted", "held-out", None, True),
    ],
)
def test_a_run_whose_last_evaluation_has_failed_can_be_resumed_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    evaluated_on: str | None,
    eval_after: float | None,
    is_left: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = small_run_overrides(tmp_path, "made", character_tokenizer(), "total_steps=8")
    run_dir = prepare_run_dir(compose_config(words))
    saved = CheckpointFolder(run_dir)
    saved.prepare()
    manifest: dict[str, Any] = {"version": 8, "incarnation": 0, "trainer_files": [], "spooled": {}, "files": []}
    saved.commit(saved.unfinished(8), FlowSnapshot({}, (), ()), manifest | {"run": {}})
    summary = {"status": status, "evaluated_on": evaluated_on, "eval_after": eval_after}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr(training, "train_in", lambda config, run_dir, checkpoint: checkpoint.version)
    if is_left:
        assert resume(run_dir, []) == 8
    else:
        with pytest.raises(ConfigError, match="nothing is left to train"):
            resume(run_dir, [])
