"""Which keys count as changed when a run is resumed."""

from __future__ import annotations

import yaml

from penstock.platform.checks.load import compose_config
from penstock.platform.config.compose import to_yaml
from penstock.platform.run.resume import changed_keys


def test_of_the_keys_that_a_run_has_saved_only_those_that_differ_count_as_changed() -> None:
    saved = yaml.safe_load(to_yaml(compose_config(["experiment=arithmetic", "run_dir=runs/x"])))
    assert not list(changed_keys(saved, compose_config(["experiment=arithmetic", "run_dir=runs/x"])))
    other = compose_config(["experiment=arithmetic", "run_dir=runs/y", "algorithm.entropy.coefficient=0.1"])
    (changed,) = changed_keys(saved, other)
    assert changed.startswith("algorithm.entropy.coefficient=0.1: the run began with 0.0, ")
