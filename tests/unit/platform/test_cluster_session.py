"""What a run on a joined cluster passes to processes in other folders, on other nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.platform.cluster import session
from penstock.platform.cluster.session import is_joined, user_modules, with_absolute_paths
from penstock.platform.config.compose import compose_all
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.run_dir import prepare_run_dir


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def configured(*overrides: str) -> RunConfig:
    composition = compose_all(["experiment=arithmetic", *overrides])
    assert composition.config is not None, composition.problems
    return composition.config


def test_paths_become_absolute_and_nothing_else_changes(tmp_path: Path) -> None:
    for folder in ("policy", "teachers/large", "buffers/w", "train"):
        (tmp_path / folder).mkdir(parents=True)
    config = configured(
        "cluster.address=10.0.0.1:6379",
        "run_dir=runs/x",
        "model.path=policy",
        "reference.path=Qwen/Qwen3-8B",
        "teacher.path=teachers/large",
        "weights.directory=buffers/w",
        "cluster.pools.train={device: cpu, count: 1, memory_gib: 4}",
        "cluster.trainer_pool=train",
    )
    absolute = with_absolute_paths(config)
    assert absolute.run_dir == str(tmp_path / "runs" / "x"), "also before it exists"
    assert absolute.model.path == str(tmp_path / "policy")
    assert absolute.teacher.path == str(tmp_path / "teachers" / "large")
    assert absolute.weights.directory == str(tmp_path / "buffers" / "w")
    assert absolute.reference.path == "Qwen/Qwen3-8B", "a name on the hub"
    assert absolute.cluster == config.cluster, "the pool `train` is not the folder `train`"
    assert with_absolute_paths(absolute) == absolute


def test_data_paths_of_the_user_code_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rubric.txt").write_text("")
    config = configured("+reward.args.rubric=data/rubric.txt", "+reward.args.other=data/none.txt")
    assert with_absolute_paths(config).reward.args == {
        "rubric": str(tmp_path / "data" / "rubric.txt"),
        "other": "data/none.txt",
    }


def test_a_run_directory_on_a_joined_cluster_is_absolute_and_its_configuration_is_as_written(tmp_path: Path) -> None:
    local, joined = configured("name=a"), configured("name=b", "cluster.address=auto")
    assert (is_joined(local), is_joined(joined)) == (False, True)
    assert prepare_run_dir(local) == Path("runs/a")
    assert prepare_run_dir(joined) == tmp_path / "runs" / "b"
    assert "run_dir: runs/b" in (tmp_path / "runs" / "b" / "config.yaml").read_text()


def test_modules_and_variables_that_the_configuration_names_are_sent() -> None:
    config = configured(
        "reward.fn=my_rewards.sums:score",
        "+reward.args.key_variable=JUDGE_KEY",
        "reward.isolation={network: true, variables: [A_KEY]}",
        "sandbox=remote",
        "+sandbox.remote.token_variable=SANDBOX_TOKEN",
        "dataflow.filters.user=my_filters.keep",
    )
    assert {"my_rewards.sums", "my_filters"} <= set(user_modules(config))
    assert set(session._named_variables(config)) == {"JUDGE_KEY", "A_KEY", "SANDBOX_TOKEN"}
