"""`env.python`: tasks, episodes and their scores of a module that our interpreter cannot import."""

from __future__ import annotations

import os
import signal
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.envs.config import EnvConfig, EpisodeConfig, StreamConfig
from penstock.envs.environment import Action, EnvironmentSource
from penstock.envs.fingerprint import fingerprints
from penstock.envs.loading import load_task_source
from penstock.envs.sandbox.bubblewrap import why_no_namespaces
from penstock.envs.streams import load_held_out, load_task_streams, named_tasks
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.envs.workers.interpreter import find_interpreter
from penstock.platform.checks.load import compose_config
from penstock.platform.config.import_paths import import_paths
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.other_interpreter import make_interpreter
from tests.small_run import small_run_overrides

FACTORY = "only_there:Echo"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_interpreter(tmp_path_factory.mktemp("other") / "venv")


def prefix_of(python: str) -> str:
    return str(Path(python).parents[1])


def env_of(python: str, act: str = "", **settings: Any) -> EnvConfig:
    return EnvConfig(factory=FACTORY, args={"act": act}, python=python, **settings)


async def scores_of(env: EnvConfig) -> tuple[float, dict[str, float]]:
    """The reward and its parts of the gold answer to the first task."""
    source: Any = load_task_source(env, 0)
    task = next(named_tasks(source, "", source.train()))
    host = EpisodeHost(env, 0)
    try:
        async with host.open(task) as episode:
            assert (await episode.reset())["content"] == task.prompt
            done = await episode.step(Action(source.gold_actions(task)[0]))
            return done["reward"], done["parts"]
    finally:
        await host.close()


async def test_tasks_episodes_and_scores_are_made_there(python: str) -> None:
    with pytest.raises(ConfigError, match="no module 'only_there' on the import path"):
        load_task_source(env_of(python).model_copy(update={"python": None}), 0)
    env = env_of(python)
    source = load_task_source(env, 0)
    assert isinstance(source, EnvironmentSource)
    tasks = list(islice(source.train(), 150))
    assert {task.fields["prefix"] for task in tasks} == {prefix_of(python)} != {sys.prefix}
    assert len({task.task_id for task in tasks}) == 150
    assert list(islice(load_task_source(env, 0).train(), 150)) == tasks
    assert source.held_out(80) == load_task_source(env, 1).held_out(80)
    assert [task.task_id for task in load_held_out(env, 0, 80)] == [task.task_id for task in source.held_out(80)]
    assert await scores_of(env) == (1.0, {"is_there": 1.0})


async def test_isolated_code_reads_its_own_interpreter(python: str) -> None:
    if problem := why_no_namespaces():
        pytest.skip(problem)
    strict = env_of(python, episode=EpisodeConfig.model_validate({"isolation": "strict"}))
    assert await scores_of(strict) == (1.0, {"is_there": 1.0})


def test_streams_and_the_fingerprint_of_the_data_are_read_there(python: str) -> None:
    env = env_of(python, streams={"a": StreamConfig(), "b": StreamConfig(args={"act": "x"})})
    streams = load_task_streams(env, 0)
    first = [next(stream.tasks) for stream in streams]
    assert [task.environment for task in first] == ["a", "b"]
    assert {task.fields["prefix"] for task in first} == {prefix_of(python)}
    assert fingerprints(env, 0).keys() == {"", "a", "b"}


def test_a_new_process_continues_where_one_has_died(python: str) -> None:
    source = load_task_source(env_of(python, "y"), 3)
    stream = source.train()
    tasks = list(islice(stream, 70))
    os.kill(tasks[-1].fields["pid"], signal.SIGKILL)
    tasks += islice(stream, 100)  # the first of them come from a frame that was sent before
    assert len({task.fields["pid"] for task in tasks}) == 2
    again = islice(load_task_source(env_of(python, "y"), 3).train(), len(tasks))
    assert [task.prompt for task in again] == [task.prompt for task in tasks]


async def test_a_killed_episode_fails_with_the_reason(python: str) -> None:
    with pytest.raises(TrajectoryError, match="its process was killed by SIGKILL") as failed:
        await scores_of(env_of(python, "is killed"))
    assert failed.value.kind == "env"


def test_what_the_source_raises_says_where(python: str) -> None:
    with pytest.raises(ConfigError, match=r"refuses them: no such act.*\(in env\.python=.*python\)"):
        load_task_source(env_of(python, "refuses"), 0)
    with pytest.raises(ConfigError, match=r"word of Echo/train/0 cannot be sent to the run.*\(in env\.python="):
        next(load_task_source(env_of(python, "no JSON"), 0).train())
    source: Any = load_task_source(env_of(python, "raises"), 0)
    with pytest.raises(RuntimeError, match="KeyError: 'gold'"):
        source.gold_actions(next(source.train()))
    elsewhere = EnvConfig(factory="nowhere_at_all:Tasks", python=python)
    with pytest.raises(ConfigError, match=r"no module 'nowhere_at_all' .*\(in env\.python="):
        load_task_source(elsewhere, 0)


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_that_cannot_be_used_is_named(tmp_path: Path, python: str) -> None:
    (tmp_path / "file").touch()
    old = script(tmp_path / "old", "#!/bin/sh\necho '[[3, 9, 2], [], \"\"]'\n")
    empty = make_interpreter(tmp_path / "empty", has_needed=False)
    wrong = {
        str(tmp_path / "nothing"): "there is no such file",
        "python_of_nobody": "there is no such program on PATH",
        prefix_of(python): "it is a folder; name the program in it, .*venv/bin/python",
        str(tmp_path / "file"): "it is not executable",
        script(tmp_path / "other", "#!/bin/sh\necho no >&2; exit 3\n"): "it ended with exit code 3: no",
        old: r"is Python 3\.9\.2; our part of its processes needs 3\.11 or newer",
        empty: f"No module named '(numpy|pydantic)'.*{empty} -m pip install numpy 'pydantic",
    }
    for path, problem in wrong.items():
        with pytest.raises(ConfigError, match=problem) as found:
            load_task_source(env_of(path), 0)
        assert found.value.violations[0].startswith(f"env.python={path}")
    assert find_interpreter(python).folders[0] == prefix_of(python)


def test_our_processes_do_not_import_what_is_only_there(python: str) -> None:
    config = compose_config(["experiment=arithmetic", f"env.factory={FACTORY}", "~env.args", f"env.python={python}"])
    assert import_paths(config).keys() & {"env.factory", "env.args.rows"} == set()


@pytest.mark.full
def test_a_dry_run_plays_it_and_names_a_missing_one(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.platform.cli.main import app

    monkeypatch.chdir(tmp_path)
    of_environment = [f"env.factory={FACTORY}", "~env.args", "reward=episode", "--dry-run"]
    words = ["train", *small_run_overrides(tmp_path, "other", character_tokenizer(), *of_environment)]
    fine = CliRunner().invoke(app, [*words, f"env.python={python}"], env={"COLUMNS": "200"})
    assert fine.exit_code == 0, fine.output
    missing = CliRunner().invoke(app, [*words, "env.python=nowhere/python"], env={"COLUMNS": "200"})
    assert missing.exit_code == 2, missing.output
    assert "env.python=nowhere/python: there is no such file" in missing.output
    checked = CliRunner().invoke(app, ["env", "check", FACTORY, "--python", python], env={"COLUMNS": "200"})
    assert checked.exit_code == 0, checked.output
