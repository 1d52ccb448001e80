"""User code has the user's permissions; in a sandbox, an error names the key that would grant a missing permission."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.envs.config import EnvConfig, EpisodeConfig, IsolationConfig, RewardConfig, RewardPartConfig, StreamConfig
from penstock.envs.sandbox import bubblewrap
from penstock.envs.sandbox.bubblewrap import user_code_arguments, why_no_namespaces
from penstock.envs.workers.permissions import environment_for, grants_of_episodes, grants_of_reward
from penstock.envs.workers.scoring import RewardRunner
from penstock.platform.checks.load import compose_config
from tests.answers import pair

THEIRS = "my_reward:f"
STRICT = IsolationConfig()

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

isolated = pytest.mark.skipif(bool(why_no_namespaces()), reason="this host allows no user namespaces")


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
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=server.accept, daemon=True).start()
        yield str(server.getsockname()[1])


def failure(result: object) -> str:
    assert isinstance(result, TrajectoryError)
    return result.summary


def test_user_code_in_a_sandbox_has_its_grants_and_the_paths_that_arguments_name() -> None:
    assert grants_of_reward(RewardConfig(fn=THEIRS)) is None
    assert grants_of_reward(RewardConfig(fn=THEIRS, isolation=STRICT)) == IsolationConfig()
    isolation = IsolationConfig(network=True, variables=("MY_KEY",), read=("~/data",))
    expected = IsolationConfig(network=True, variables=("MY_KEY",), read=(str(Path.home() / "data"),))
    assert grants_of_reward(RewardConfig(fn=THEIRS, isolation=isolation)) == expected
    parts = {"a": RewardPartConfig(fn=THEIRS, args={"rows": "/usr/share"}), "b": RewardPartConfig(fn=THEIRS)}
    assert grants_of_reward(RewardConfig(parts=parts, isolation=STRICT)) == IsolationConfig(read=("/usr/share",))


def test_environments_share_processes_and_so_what_the_arguments_of_one_name() -> None:
    streams = {"a": StreamConfig(factory="my_env:Echo", args={"rows": "/usr/share"})}
    assert grants_of_episodes(EnvConfig(factory="arithmetic", streams=streams)) is None
    strict = EpisodeConfig(isolation=STRICT)
    assert grants_of_episodes(EnvConfig(factory="arithmetic", streams=streams, episode=strict)) == IsolationConfig(
        read=("/usr/share",)
    )


def test_what_arguments_name_may_be_read(tmp_path: Path) -> None:
    args = {"model": str(tmp_path), "more": [{"rows": str(tmp_path / "none")}], "text": "x\0y", "here": "."}
    grants = grants_of_reward(RewardConfig(fn=THEIRS, args=args, isolation=STRICT))
    assert grants == IsolationConfig(read=(str(tmp_path),))


def test_of_the_environment_harmless_names_and_those_granted_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"CUDA_VISIBLE_DEVICES": "0", "TOKENIZERS_PARALLELISM": "false", "PENSTOCK_X": "", "OMP_NUM_THREADS": "1"}
    kept_back = {"OPENAI_API_KEY": "x", "CUDA_TOKEN": "x", "PENSTOCK_PASSWORD": "x", "WANDB_API_KEY": "x", "MINE": "1"}
    for name, value in {**given, **kept_back}.items():
        monkeypatch.setenv(name, value)
    found = environment_for(IsolationConfig(variables=("MINE",)))
    assert given.items() <= found.items()
    assert {name for name in kept_back if name in found} == {"MINE"}
    assert {name for name in kept_back if name not in environment_for(None)} == {"WANDB_API_KEY"}


def test_a_home_on_the_import_path_shows_its_modules_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    for name in ("package/__init__.py", "notes/secret.txt", "module.py", ".netrc"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.syspath_prepend(str(home))
    shown = user_code_arguments([], str(tmp_path / "own"), has_network=False)
    below_home = {path for path in shown if path.startswith(str(home))}
    assert below_home == {f"{home}/module.py", f"{home}/package", str(home)}
    assert shown[shown.index(str(home)) - 1] == "--dir"  # it is there, and empty
    granted = user_code_arguments([str(home)], str(tmp_path / "own"), has_network=False)
    assert granted[granted.index(str(home)) - 1] == "--ro-bind-try"


async def test_user_code_has_the_user_s_permissions_except_the_tracker_s_key(
    score: Callable[..., Any], secret: Path, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MY_KEY"):
        monkeypatch.setenv(name, "x")
    read, policy_runtime, named, *keys = await asyncio.gather(
        score("read", str(secret)),
        score("connect", port),
        score("names"),
        score("wrapped", "WANDB_API_KEY"),
        score("wrapped", "SWANLAB_API_KEY"),
    )
    assert (read, policy_runtime, named) == (Score(4.0, {}), Score(1.0, {}), Score(1.0, {"MY_KEY": 1.0}))
    assert [failure(key) for key in keys] == 2 * ["reward: RuntimeError: no key for the service"]


@isolated
async def test_a_file_in_home_needs_a_grant_or_an_argument(score: Callable[..., Any], secret: Path) -> None:
    refused, granted, named = await asyncio.gather(
        score("read", str(secret), isolation=STRICT),
        score("read", str(secret), isolation=IsolationConfig(read=(str(secret),))),
        score("read", args={"path": str(secret)}, isolation=STRICT),
    )
    assert failure(refused).endswith(f"set reward.isolation.read=[{secret}]; docs/guides/sandbox.md]")
    assert granted == named == Score(4.0, {})


@isolated
async def test_the_network_needs_a_grant(score: Callable[..., Any], port: str) -> None:
    refused, granted = await asyncio.gather(
        score("connect", port, isolation=STRICT), score("connect", port, isolation=IsolationConfig(network=True))
    )
    assert "reward.isolation.network=true" in failure(refused)
    assert granted == Score(1.0, {})
    assert "isolation" not in failure(await score("connect", "1", isolation=IsolationConfig(network=True)))


@isolated
async def test_variables_need_a_grant(score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "x")
    monkeypatch.setenv("MY_OTHER", "x")
    one = IsolationConfig(variables=("MY_KEY",))
    assert await score("names", isolation=one) == Score(1.0, {"MY_KEY": 1.0})
    assert await score("names", isolation=STRICT) == Score(0.0, {})


async def test_where_there_are_no_namespaces_strict_is_refused_with_the_remedy(
    score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    why_no_namespaces.cache_clear()
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: "/bin/false")
    try:
        with pytest.raises(ConfigError, match=r"reward.isolation=strict, but this host .*Allow user namespaces"):
            await score("names", isolation=STRICT)
    finally:
        why_no_namespaces.cache_clear()


@isolated
async def test_the_cause_of_a_failure_is_explained_too(score: Callable[..., Any]) -> None:
    said = failure(await score("wrapped", "MY_KEY", isolation=STRICT))
    assert said.startswith("reward: RuntimeError: no key for the service [isolation is strict: ")
    assert "reward.isolation.variables=[MY_KEY]" in said


@isolated
async def test_code_that_does_not_load_for_a_missing_permission_reports_it(
    score: Callable[..., Any], secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_IMPORT", str(secret))
    with pytest.raises(ConfigError, match=rf"importing granted_rewards raised .*reward.isolation.read=\[{secret}\]"):
        await score("names", isolation=STRICT)


@isolated
async def test_processes_locks_and_temporary_files_work(score: Callable[..., Any]) -> None:
    assert await score("works", isolation=STRICT) == Score(6.0, {})
    assert not Path("/tmp/notes").exists()


@isolated
async def test_a_sandbox_cannot_create_namespaces(score: Callable[..., Any]) -> None:
    assert await score("Runs") == Score(42.0, {})
    assert "sandboxes cannot be nested: use isolation=process or sandbox=remote" in failure(
        await score("Runs", isolation=STRICT)
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("reward.isolation=strict", STRICT),
        ("reward.isolation.network=true", IsolationConfig(network=True)),
        ("reward.isolation={network: true, variables: [A]}", IsolationConfig(network=True, variables=("A",))),
        ("reward.isolation.read=[/data]", IsolationConfig(read=("/data",))),
        ("reward.isolation=process", None),
    ],
)
def test_isolation_is_set_on_the_command_line(override: str, expected: IsolationConfig | None) -> None:
    config = compose_config(["experiment=arithmetic", override, override.replace("reward.", "env.episode.")])
    assert config.reward.isolation == config.env.episode.isolation == expected
    assert RewardConfig.model_validate_json(json.dumps(config.reward.model_dump(mode="json"))) == config.reward


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.isolation=strct", "Did you mean strict?"),
        ("reward.isolation.netwrk=true", "Did you mean reward.isolation.network?"),
        ("env.reasoning=thnk", "Did you mean think?"),
    ],
)
def test_a_misspelt_isolation_names_the_nearest(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["experiment=arithmetic", override])
    assert message in str(caught.value)
