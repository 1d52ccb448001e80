"""What every results file says of where its figures come from: the commit that was measured, and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def provenance() -> list[str]:
    """One line each."""
    return [f"commit: {_commit()}", f"machine: {_machine()}"]


def cpu_name() -> str:
    """The model that the kernel names, else the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
        return git("rev-parse", "--short", "HEAD") + (", with changes that are not committed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        sent = ROOT / "COMMIT"  # by tools/bare_gpu/build.py
        return sent.read_text().strip() if sent.exists() else "not recorded: no git here"


def _machine() -> str:
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.system()
    cores, memory_gib = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    return f"{cpu_name()}, {cores} cores, {memory_gib:.0f} GiB, {system}, Python {platform.python_version()}"
