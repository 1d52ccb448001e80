"""`penstock sandbox check` and the guide's example, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.hostile_cases import HOSTILE_CASES
from penstock.envs.sandbox.local import ForkServer
from penstock.platform.cli_sandbox import run_sandbox_check

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "sandbox.md"


@pytest.mark.parametrize("isolate", [True, False])
def test_the_check_says_which_isolation_it_found_and_what_it_contains(isolate: bool, tmp_path: Path) -> None:
    server = ForkServer(SandboxConfig(), isolate=isolate)
    server.close()
    with (tmp_path / "said.txt").open("w+") as file:
        exit_code = run_sandbox_check(isolate=isolate, console=Console(file=file, width=200))
        file.seek(0)
        said = file.read()
    assert said.startswith(f"isolation: {server.isolation}")
    assert all(case.name in said for case in HOSTILE_CASES)
    if server.isolation.is_isolated:
        assert exit_code == 0
        assert f"all {len(HOSTILE_CASES)} contained" in said
        assert "NOT" not in said
    else:
        assert exit_code == 1
        assert re.search(r"reads the host's files\s+│ NOT CONTAINED", said)
        assert "run no code here that you do not trust" in said


def test_the_example_of_the_guide_prints_what_the_guide_says(tmp_path: Path) -> None:
    server = ForkServer(SandboxConfig())
    server.close()
    if not server.isolation.is_isolated:
        pytest.skip(f"this host allows no isolation: {server.isolation.problem}")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (example,) = [text for language, text in blocks if language == "python"]
    (printed,) = [text for language, text in blocks if language == "text"]
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=True,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout == printed
