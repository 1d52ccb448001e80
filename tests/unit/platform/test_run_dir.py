"""The run directory: made once, and used again only by a warm start of the same configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from penstock.dataflow.errors import ConfigError
from penstock.platform.config.compose import compose_config
from penstock.platform.config.load import load_config
from penstock.platform.config.schema import RunConfig
from penstock.platform.run_dir import is_finished, mark_finished, prepare_run_dir
from penstock.platform.sft import run_sft


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def warm_start(*overrides: str) -> RunConfig:
    return compose_config(["experiment=arithmetic_sft", "name=warm", *overrides], command="sft")


def test_a_new_directory_says_what_the_run_is():
    config = warm_start("seed=3")
    run_dir = prepare_run_dir(config)
    assert RunConfig.model_validate(yaml.safe_load((run_dir / "config.yaml").read_text())) == config
    assert json.loads((run_dir / "environment.json").read_text())["packages"]["torch"]


def test_an_old_run_is_deleted_only_when_asked():
    prepare_run_dir(warm_start())
    Path("runs/warm/metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"runs/warm exists and is not empty.*overwrite=true"):
        prepare_run_dir(warm_start())
    prepare_run_dir(warm_start("overwrite=true"))
    assert not Path("runs/warm/metrics.jsonl").exists()


def test_a_run_is_finished_once_marked_and_for_its_own_configuration_only():
    prepare_run_dir(warm_start())
    assert not is_finished(warm_start())
    mark_finished(warm_start())
    assert is_finished(warm_start())
    assert is_finished(warm_start("sft.reuse=true", "overwrite=true"))
    assert not is_finished(warm_start("seed=1"))
    assert not is_finished(warm_start("sft.stop_at_accuracy=0.2"))
    assert not is_finished(warm_start("env.args.digits=2"))


def test_a_finished_warm_start_is_used_again_and_another_one_must_be_overwritten(capsys):
    prepare_run_dir(warm_start())
    mark_finished(warm_start())
    again = load_config("sft", ["experiment=arithmetic_sft", "name=warm", "sft.reuse=true"]).config
    assert run_sft(again) == 0
    assert "runs/warm/policy" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists and is not empty"):
        load_config("sft", ["experiment=arithmetic_sft", "name=warm", "sft.reuse=true", "seed=1"])
