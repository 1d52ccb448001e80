"""Ending every process that this one started, by force if necessary."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import ray

GRACE_S = 2.0


def descendants() -> list[psutil.Process]:
    """All processes below this one."""
    return psutil.Process().children(recursive=True)


def ray_processes() -> list[psutil.Process]:
    """Ray's daemons that this process started, and every worker below them."""
    of_ray = f"{Path(ray.__file__).parent}/"
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if any(of_ray in argument for argument in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def end_processes(processes: list[psutil.Process]) -> int:
    """Wait `GRACE_S` for processes to end by themselves, then kill the rest; returns how many had to be killed.

    A process keeps its identity here (pid and start time), so a reused pid is never hit.
    """
    _, alive = psutil.wait_procs(processes, timeout=GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return len(alive)
