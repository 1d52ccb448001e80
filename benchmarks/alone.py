"""Run a program alone, and in an environment of its own: what comparisons with other libraries need."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / ".bench"
"""Scratch: environments, logs, run directories. Not in git."""
STOP_S, SAMPLE_S = 30.0, 5.0


def run_alone(name: str, command: list[str | Path], timeout_s: float) -> float:
    """Run to the end, output to .bench/logs, and leave no process behind.

    Returns:
        Share of all cores that others had meanwhile, percent: above a few the run was not alone.

    Raises:
        SystemExit: If it fails or takes longer than `timeout_s`, with the end of its output.
    """
    log = BENCH / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    problem = f"took longer than --timeout-s {timeout_s:.0f}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        others = Others(process.pid)
        try:
            while process.poll() is None and time.monotonic() - others.started < timeout_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SAMPLE_S)
                others.sample()
            if process.returncode is not None:
                problem = f"ended with exit code {process.returncode}" if process.returncode else ""
        finally:
            end(process)
    if problem:
        lines = log.read_text(errors="replace").splitlines()
        raise SystemExit("\n".join([f"{name} {problem}. The end of {log.relative_to(ROOT)}:", *lines[-20:]]))
    return others.percent()


class Others:
    """What the cores did meanwhile that was not work of one process tree; the hypervisor's share counts too."""

    def __init__(self, pid: int) -> None:
        self.started = time.monotonic()
        self._root = psutil.Process(pid)
        self._busy_s = machine_busy_s()
        self._last_s: dict[int, float] = {}
        self._others_s = 0.0
        self._sampled_s = 0.0
        self._last_sample = self.started

    def sample(self) -> None:
        """Account for the time since the last call. A tree that has ended is not accounted for."""
        now_s: dict[int, float] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    now_s[process.pid] = times.user + times.system
        busy_s, now = machine_busy_s(), time.monotonic()
        if now_s:
            own_s = sum(seconds - self._last_s.get(pid, 0.0) for pid, seconds in now_s.items())
            self._others_s += max(0.0, busy_s - self._busy_s - own_s)
            self._sampled_s += now - self._last_sample
        self._last_s, self._busy_s, self._last_sample = now_s, busy_s, now

    def percent(self) -> float:
        return 100.0 * self._others_s / max(self._sampled_s, 1e-9) / (psutil.cpu_count() or 1)


def machine_busy_s() -> float:
    """Busy seconds of all cores since boot, steal time included."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process that still runs to end, then kill what is left of its tree: Ray's daemons have own sessions."""
    if process.poll() is not None:
        return
    tree = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    process.kill()
    process.wait()
    for child in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(tree, STOP_S)


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Install `packages`, the first one first, into a virtual environment of their own.

    Does nothing if that is done: the stamp is written last. `PIP_ARGS` is passed on to pip, as by `make setup`.

    Returns:
        Its python.
    """
    stamp, python = folder / ".packages", folder / "bin" / "python"
    if stamp.exists() and stamp.read_text().split() == packages:
        return python
    print(f"installing {packages[-1]} into {folder.relative_to(ROOT)}: some minutes", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip: list[str | Path] = [python, "-m", "pip", "-qq", "--disable-pip-version-check", "--no-input", "install"]
    for batch in (packages[:1], packages):
        subprocess.run([*pip, *shlex.split(os.environ.get("PIP_ARGS", "")), *batch], check=True)
    stamp.write_text("\n".join(packages))
    return python
