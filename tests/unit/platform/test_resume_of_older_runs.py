"""Which keys of a run that an older version began count as changed when it is resumed."""

from __future__ import annotations

from typing import Any

from penstock.platform.checks.load import compose_config
from penstock.platform.run.resume import changed_keys


def saved_config() -> dict[str, Any]:
    saved: dict[str, Any] = compose_config(["experiment=arithmetic", "run_dir=runs/x"]).model_dump(mode="json")
    return saved


def test_a_key_that_is_newer_than_the_run_had_its_default() -> None:
    saved = saved_config()
    del saved["rollout"]["sampling"]["top_k"]
    del saved["algorithm"]["entropy"]
    assert not list(changed_keys(saved, compose_config(["experiment=arithmetic", "run_dir=runs/x"])))
    other = compose_config(["experiment=arithmetic", "run_dir=runs/x", "algorithm.entropy.coefficient=0.1"])
    (changed,) = changed_keys(saved, other)
    assert changed.startswith("algorithm.entropy.coefficient=0.1: the run began with 0.0, ")


def test_a_key_of_the_run_that_this_version_does_not_have_is_named() -> None:
    saved = saved_config()
    saved["algorithm"]["older"] = 1
    (changed,) = changed_keys(saved, compose_config(["experiment=arithmetic", "run_dir=runs/x"]))
    assert changed.startswith("algorithm.older=None: the run began with 1, ")
