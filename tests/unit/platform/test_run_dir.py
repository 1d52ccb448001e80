"""The run directory: created once, and reused only by a warm start with the same configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.dataflow.errors import ConfigError
from penstock.envs.fingerprint import changes, fingerprints
from penstock.platform.checks.load import compose_config, load_config, load_warm_start
from penstock.platform.checks.model_files import awaits_warm_start
from penstock.platform.checks.run_dir import is_finished
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.offline_training import run_sft
from penstock.platform.run.run_dir import mark_finished, prepare_run_dir
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.models.tiny_policy import create_policy


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def warm_start(*overrides: str) -> RunConfig:
    return compose_config(["experiment=arithmetic_sft", "name=warm", *overrides], command="sft")


def test_a_new_directory_describes_the_run():
    config = warm_start("seed=3")
    run_dir = prepare_run_dir(config)
    assert RunConfig.model_validate(yaml.safe_load((run_dir / "config.yaml").read_text())) == config
    assert json.loads((run_dir / "environment.json").read_text())["packages"]["torch"]


def test_an_old_run_is_deleted_only_on_request():
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


def test_the_policy_of_a_warm_start_that_was_ended_early_is_made_again():
    named = 'warm_start=["experiment=arithmetic_sft","name=warm"]'
    config = compose_config(["experiment=arithmetic_stages", "model.path=runs/warm/policy", named])
    assert awaits_warm_start(config), "there is none"
    prepare_run_dir(warm_start())
    Path("runs/warm/policy").mkdir()
    Path("runs/warm/policy/config.json").touch()
    assert awaits_warm_start(config), "it is of an early step"
    made = load_warm_start(config, None, dry_run=True)
    assert (made.run_dir, made.overwrite) == ("runs/warm", True)
    mark_finished(warm_start())
    assert not awaits_warm_start(config)
    Path("runs/warm/finished.yaml").unlink()
    Path("runs/warm/summary.json").touch()
    assert not awaits_warm_start(config), "it is of a run of reinforcement learning"


def test_a_finished_warm_start_is_used_again_and_another_one_must_be_overwritten(capsys):
    prepare_run_dir(warm_start())
    mark_finished(warm_start())
    again = load_config("sft", ["experiment=arithmetic_sft", "name=warm", "sft.reuse=true"]).config
    assert run_sft(again) == 0
    assert "runs/warm/policy" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists and is not empty"):
        load_config("sft", ["experiment=arithmetic_sft", "name=warm", "sft.reuse=true", "seed=1"])


ROWS = ["env=dataset", "env.args.path=rows.jsonl"]


def write_rows(num_rows: int) -> None:
    rows = [{"prompt": f"{index}+1=", "answer": str(index + 1)} for index in range(num_rows)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_keeps_a_fingerprint_of_its_data_and_is_not_finished_on_other_data():
    write_rows(100)
    data = json.loads((prepare_run_dir(warm_start(*ROWS)) / "data.json").read_text())
    assert sum(split["num_tasks"] for split in data[""]["splits"].values()) == 100
    mark_finished(warm_start(*ROWS))
    assert is_finished(warm_start(*ROWS))
    write_rows(101)
    assert not is_finished(warm_start(*ROWS))
    Path("rows.jsonl").unlink()
    assert not is_finished(warm_start(*ROWS))
    write_rows(100)
    assert is_finished(warm_start(*ROWS)), "the same rows are the same data"


def test_a_drawn_source_is_known_by_its_first_tasks_and_streams_by_their_names():
    two, three = (fingerprints(warm_start(f"env.args.digits={digits}").env, 0) for digits in (2, 3))
    assert two[""]["splits"] != three[""]["splits"]
    assert two[""]["splits"].keys() == {"drawn"}
    assert changes(two, three) == [], "another source is no change of one"
    mixed = fingerprints(warm_start("env=arithmetic_mixed").env, 0)
    assert set(mixed) == {"", "easy", "hard"}
    assert mixed["hard"] == three[""]


def test_training_that_continues_from_a_policy_of_other_data_reports_it():
    write_rows(100)
    run_dir = prepare_run_dir(warm_start(*ROWS))
    model = warm_start().model
    create_policy(model, character_tokenizer(), str(run_dir / "policy"), 0)
    own = ["rollout/engine=torch", f"model.path={run_dir}/policy", "evaluation.num_tasks=1"]
    overrides = ["experiment=arithmetic", *ROWS, *own]

    def warnings() -> list[str]:
        return [one for one in load_config("train", overrides, dry_run=True).warnings if "the data has changed" in one]

    assert warnings() == []
    write_rows(120)
    (warning,) = warnings()
    found = re.search(r", train: other tasks, had (\d+) tasks \(\w+\), now (\d+) tasks", warning)
    assert found, warning
    assert int(found[1]) < int(found[2])


def test_a_changed_seed_is_no_changed_data_and_an_order_is_told_from_other_rows():
    write_rows(100)
    for overrides in (ROWS, ["env.args.digits=3"]):
        before, now = (fingerprints(warm_start(*overrides).env, seed) for seed in (0, 1))
        assert (before[""]["seed"], now[""]["seed"]) == (0, 1)
        assert changes(before, now, includes_order=True) == []
    before = fingerprints(warm_start(*ROWS).env, 0)
    lines = Path("rows.jsonl").read_text().splitlines()
    Path("rows.jsonl").write_text("\n".join(reversed(lines)))
    reordered = fingerprints(warm_start(*ROWS).env, 0)
    assert changes(before, reordered) == [], "training on the same rows"
    in_order = changes(before, reordered, includes_order=True)
    assert [sentence.partition("}], ")[2] for sentence in in_order] == [
        f"{name}: the same {before['']['splits'][name]['num_tasks']} tasks are in another order"
        for name in ("train", "held_out")
    ]
    Path("rows.jsonl").write_text("\n".join([*lines[:-1], lines[-1].replace("100", "101")]))
    (other,) = changes(before, fingerprints(warm_start(*ROWS).env, 0))
    assert "other tasks" in other
    assert changes({"": {"source": before[""]["source"], "num_tasks": 100, "digest": "00"}}, before) == []
