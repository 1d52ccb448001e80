"""Which keys count as changed when a run is resumed, and what a damaged file of it leads to."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from penstock.dataflow.errors import CheckpointError
from penstock.platform.checks.load import compose_config
from penstock.platform.config.compose import to_yaml
from penstock.platform.run.resume import changed_keys, train


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
