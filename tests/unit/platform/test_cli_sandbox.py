"""`penstock sandbox check` and `serve`, and the guide's example, as a user runs them."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from penstock.envs.sandbox.config import RemoteConfig, SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program, SandboxUnavailableError
from penstock.envs.sandbox.hostile import HOSTILE_CASES
from penstock.envs.sandbox.local import Isolation, try_isolation
from penstock.envs.sandbox.remote import RemoteSandbox
from penstock.platform.cli.sandbox import run_sandbox_check

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "sandbox.md"


@pytest.mark.parametrize("isolate", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_check_says_which_isolation_it_found_and_what_it_contains(isolate: bool, tmp_path: Path) -> None:
    isolation = try_isolation(SandboxConfig()) if isolate else Isolation("it was not asked")
    with (tmp_path / "said.txt").open("w+") as file:
        exit_code = run_sandbox_check(isolate=isolate, console=Console(file=file, width=200))
        file.seek(0)
        said = file.read()
    assert said.startswith(f"isolation: {str(isolation)[:20]}")
    assert all(case.name in said for case in HOSTILE_CASES)
    if isolation.is_isolated:
        assert exit_code == 0
        assert f"all {len(HOSTILE_CASES)} contained" in said
        assert "NOT" not in said
    else:
        assert exit_code == 1
        assert re.search(r"reads the host's files\s+│ NOT CONTAINED", said)
        assert "do not run untrusted code" in said


def test_the_example_of_the_guide_prints_what_the_guide_says(tmp_path: Path) -> None:
    isolation = try_isolation(SandboxConfig())
    if not isolation.is_isolated:
        pytest.skip(f"this host allows no isolation: {isolation.problem}")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (example,) = [text for language, text in blocks if language == "python"]
    (printed,) = [text for language, text in blocks if language == "text"]
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=True,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout == printed


@pytest.mark.full
async def test_the_service_asks_for_its_token_and_ends_the_program_of_a_client_that_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("SANDBOX_TOKEN", "sesame")
    command = ["sandbox", "serve", "--port", str(port), "--token-variable", "SANDBOX_TOKEN", "experiment=arithmetic",
               "sandbox.allow_unisolated=true", "sandbox.limits.wall_s=60"]  # fmt: skip
    paths = os.pathsep.join(filter(None, sys.path))
    service = subprocess.Popen(  # noqa: ASYNC220  before anything else
        [sys.executable, "-c", "from penstock.platform.cli.main import main; main()", *command],
        stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    url, nap = f"http://127.0.0.1:{port}", f"718.{os.getpid()}"
    stranger = RemoteSandbox(RemoteConfig(url=url), 1)
    friend = RemoteSandbox(RemoteConfig(url=url, token_variable="SANDBOX_TOKEN", backoff_s=0.5, max_attempts=100), 1)
    try:
        assert (await friend.run(Program("print(1 + 1)"), Limits())).stdout == "2\n"
        with pytest.raises(SandboxUnavailableError, match="HTTP 401"):
            await stranger.run(Program("print(1 + 1)"), Limits())
        running = asyncio.create_task(friend.run(Program(argv=("sleep", nap)), Limits(wall_s=50)))
        await until(lambda: sleeps(nap))
        running.cancel()
        await until(lambda: not sleeps(nap))
    finally:
        await asyncio.gather(stranger.close(), friend.close())
        service.terminate()
        assert service.wait(60) == 0


def sleeps(nap: str) -> bool:
    return f"sleep {nap}" in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.05)
