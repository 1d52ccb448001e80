"""Following a running `penstock` command."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.command_line import ENVIRONMENT, PENSTOCK


def start_train(workspace: Path, *overrides: str) -> subprocess.Popen[str]:
    """`penstock train` in its own process group, with an output that is read line by line."""
    return subprocess.Popen(
        [PENSTOCK, "train", *overrides],
        cwd=workspace,
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_line(process: subprocess.Popen[str], marker: str, timeout_s: float) -> list[str]:
    """Read lines until one holds `marker`."""
    assert process.stdout is not None
    lines: list[str] = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        assert line, f"ended early: {lines} {process.stderr.read() if process.stderr else ''}"
        lines.append(line)
        if marker in line:
            return lines
    raise AssertionError(f"{marker!r} did not appear within {timeout_s} s: {lines}")
