"""User code is contained; what is granted works, and what is not says by which key it would be."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.envs import child_process
from penstock.envs.config import EnvConfig, EpisodeConfig, RewardConfig, RewardPartConfig, RightsConfig, StreamConfig
from penstock.envs.containment import why_not_contained
from penstock.envs.rights import Grants, environment_for, grants_of_episodes, grants_of_reward
from penstock.envs.scoring import RewardRunner
from penstock.envs.view import plan_view
from penstock.platform.config.compose import compose_config
from tests.answers import pair

OURS, THEIRS = "penstock.envs.arithmetic:exact_match", "my_reward:f"

REWARDS = """
import multiprocessing, os, socket, subprocess, tempfile
from pathlib import Path
from penstock.envs.sandbox.contract import Limits, Program
from penstock.envs.sandbox.open_sandbox import open_sandbox

def read(trajectory, path=None, **_):
    return len(Path(path or trajectory.response).read_text())

def connect(trajectory, **_):
    socket.create_connection(("127.0.0.1", int(trajectory.response)), timeout=5).close()
    return 1.0

def names(trajectory, **_):
    return {name: 1.0 for name in sorted(os.environ) if name.startswith("MY_")} or 0.0

def wrapped(trajectory, **_):
    try:
        os.environ[trajectory.response]
    except KeyError as error:
        raise RuntimeError("no key for the service") from error

def works(trajectory, **_):
    context = multiprocessing.get_context("fork")
    with tempfile.NamedTemporaryFile() as file, context.Lock(), context.Pool(2) as pool:
        file.write(b"x")
        Path("/tmp/notes").write_text("x")
        return sum(pool.map(len, ["a", "bc"])) + len(subprocess.check_output(["echo", "ab"]))

class Runs:
    def __init__(self, sandbox):
        self.sandbox = open_sandbox(sandbox)

    @classmethod
    def build(cls, context):
        return cls(context.sandbox)

    async def __call__(self, trajectory, **_):
        result = await self.sandbox.run(Program("print(6 * 7)"), Limits(wall_s=20.0))
        return float(result.stdout)

raise_at_import = os.environ.get("PENSTOCK_TEST_IMPORT")
if raise_at_import:
    open(raise_at_import)
"""

contained = pytest.mark.skipif(bool(why_not_contained()), reason="this host cannot contain")


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`(function, response, **keys of the section)` to what the worker gives."""
    folder = tmp_path / "on_the_path"
    folder.mkdir()
    (folder / "granted_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(folder))

    async def made(name: str, response: str = "", **keys: Any) -> Score | TrajectoryError:
        runner = RewardRunner(RewardConfig(fn=f"granted_rewards:{name}", timeout_s=40.0, **keys))
        try:
            return (await runner.score_many([pair(response)]))[0]
        finally:
            await runner.shutdown()

    return made


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file in home that only its owner may read."""
    path = Path.home() / f".penstock-test-{os.getpid()}"
    path.write_text("four")
    path.chmod(0o600)
    yield path
    path.unlink()


@pytest.fixture
def port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=door.accept, daemon=True).start()
        yield str(door.getsockname()[1])


def failure(result: object) -> str:
    assert isinstance(result, TrajectoryError)
    return result.summary


def test_code_of_ours_has_the_users_rights_unless_a_section_says_otherwise() -> None:
    assert grants_of_reward(RewardConfig(fn=OURS)) is None
    assert grants_of_reward(RewardConfig(fn=THEIRS)) == Grants()
    both = {"a": RewardPartConfig(fn=OURS), "b": RewardPartConfig(fn=THEIRS)}
    assert grants_of_reward(RewardConfig(parts=both)) == Grants()
    assert grants_of_reward(RewardConfig(fn=THEIRS, rights=RightsConfig(user=True))) is None
    rights = RightsConfig(network=True, variables=("MY_KEY",), read=("~/data",))
    expected = Grants(network=True, variables=("MY_KEY",), read=(str(Path.home() / "data"),))
    assert grants_of_reward(RewardConfig(fn=OURS, rights=rights)) == expected


def test_environments_share_processes_so_one_of_the_users_contains_all() -> None:
    assert grants_of_episodes(EnvConfig(factory="arithmetic")) is None
    assert grants_of_episodes(EnvConfig(factory="my_env:Echo")) == Grants()
    assert grants_of_episodes(EnvConfig(factory="arithmetic", streams={"a": StreamConfig(factory="my_env:Echo")}))
    user = EpisodeConfig(rights=RightsConfig(user=True))
    assert grants_of_episodes(EnvConfig(factory="my_env:Echo", episode=user)) is None


def test_what_arguments_name_may_be_read(tmp_path: Path) -> None:
    args = {"model": str(tmp_path), "more": [{"rows": str(tmp_path / "none")}], "text": "x\0y", "here": "."}
    grants = grants_of_reward(RewardConfig(fn=THEIRS, args=args))
    assert grants == Grants(read=(str(tmp_path),))


def test_of_the_environment_harmless_names_and_those_granted_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"CUDA_VISIBLE_DEVICES": "0", "TOKENIZERS_PARALLELISM": "false", "PENSTOCK_X": "", "OMP_NUM_THREADS": "1"}
    kept_back = {"OPENAI_API_KEY": "x", "CUDA_TOKEN": "x", "PENSTOCK_PASSWORD": "x", "WANDB_API_KEY": "x", "MINE": "1"}
    for name, value in {**given, **kept_back}.items():
        monkeypatch.setenv(name, value)
    found = environment_for(Grants(variables=("MINE",)))
    assert given.items() <= found.items()
    assert {name for name in kept_back if name in found} == {"MINE"}
    assert {name for name in kept_back if name not in environment_for(None)} == {"WANDB_API_KEY"}


def test_a_home_on_the_import_path_shows_its_modules_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    for name in ("package/__init__.py", "notes/secret.txt", "module.py", ".netrc"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    (tmp_path / "leads_there").symlink_to(home / "package")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.syspath_prepend(str(home))
    view = plan_view([str(tmp_path / "leads_there")], str(tmp_path / "own"), has_network=False)
    assert {path for path in view.shown if path.startswith(str(tmp_path))} == {
        f"{home}/module.py",
        f"{home}/package",
    }
    assert view.links[f"{tmp_path}/leads_there"] == f"{home}/package"
    granted = plan_view([str(home)], str(tmp_path / "own"), has_network=False)
    assert str(home) in granted.shown


@contained
async def test_a_file_in_home_needs_a_grant_or_an_argument(score: Callable[..., Any], secret: Path) -> None:
    refused, granted, named = await asyncio.gather(
        score("read", str(secret)),
        score("read", str(secret), rights=RightsConfig(read=(str(secret),))),
        score("read", args={"path": str(secret)}),
    )
    assert failure(refused).endswith(f"needs reward.rights.read=[{secret}]; docs/guides/sandbox.md]")
    assert granted == named == Score(4.0, {})


@contained
async def test_the_network_needs_a_grant(score: Callable[..., Any], port: str) -> None:
    refused, granted = await asyncio.gather(
        score("connect", port), score("connect", port, rights=RightsConfig(network=True))
    )
    assert "reward.rights.network=true" in failure(refused)
    assert granted == Score(1.0, {})
    assert "rights" not in failure(await score("connect", "1", rights=RightsConfig(network=True)))


async def test_variables_need_a_grant_on_every_host(
    score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", "x")
    monkeypatch.setenv("MY_OTHER", "x")
    one = RightsConfig(variables=("MY_KEY",))
    assert await score("names", rights=one) == Score(1.0, {"MY_KEY": 1.0})
    assert await score("names", rights=RightsConfig(user=True)) == Score(2.0, {"MY_KEY": 1.0, "MY_OTHER": 1.0})
    monkeypatch.setattr(child_process, "why_not_contained", lambda: "no namespaces here")
    with caplog.at_level(logging.WARNING):
        assert await score("names", rights=one) == Score(1.0, {"MY_KEY": 1.0})
        assert await score("names") == Score(0.0, {})
    assert [record.getMessage() for record in caplog.records if "no namespaces here" in record.getMessage()][1:] == []
    assert "cannot contain" in caplog.text


@contained
async def test_the_cause_of_a_failure_is_explained_too(score: Callable[..., Any]) -> None:
    said = failure(await score("wrapped", "MY_KEY"))
    assert said.startswith("reward: RuntimeError: no key for the service [it runs contained: ")
    assert "reward.rights.variables=[MY_KEY]" in said


@contained
async def test_what_does_not_load_for_a_missing_right_says_so(
    score: Callable[..., Any], secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_IMPORT", str(secret))
    with pytest.raises(ConfigError, match=rf"importing granted_rewards raised .*reward.rights.read=\[{secret}\]"):
        await score("names")


@contained
async def test_processes_locks_and_temporary_files_work(score: Callable[..., Any]) -> None:
    assert await score("works") == Score(6.0, {})
    assert not Path("/tmp/notes").exists()


@contained
async def test_a_contained_reward_runs_programs_in_the_sandbox(score: Callable[..., Any]) -> None:
    assert await score("Runs") == Score(42.0, {})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("reward.rights=user", RightsConfig(user=True)),
        ("reward.rights.network=true", RightsConfig(network=True)),
        ("reward.rights={network: true, variables: [A]}", RightsConfig(network=True, variables=("A",))),
        ("reward.rights.read=[/data]", RightsConfig(read=("/data",))),
        ("reward.rights=null", None),
    ],
)
def test_rights_are_set_on_the_command_line(override: str, expected: RightsConfig | None) -> None:
    config = compose_config(["experiment=arithmetic", override, override.replace("reward.", "env.episode.")])
    assert config.reward.rights == config.env.episode.rights == expected
    assert RewardConfig.model_validate_json(json.dumps(config.reward.model_dump(mode="json"))) == config.reward


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.rights=usr", "Did you mean user?"),
        ("reward.rights.netwrk=true", "Did you mean reward.rights.network?"),
        ("env.reasoning=thnk", "Did you mean think?"),
    ],
)
def test_a_misspelt_right_names_the_nearest(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["experiment=arithmetic", override])
    assert message in str(caught.value)
