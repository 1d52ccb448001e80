"""Run a program alone, and in an environment of its own: what comparisons with other libraries need."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / ".bench"
"""Scratch: environments, logs, run directories. Not in git."""
STOP_S = 30.0


def run_alone(name: str, command: list[str | Path], timeout_s: float) -> float:
    """Run to the end, output to .bench/logs, and leave no process behind.

    Returns:
        How busy all cores were in the two seconds before, percent.

    Raises:
        SystemExit: If it fails or takes longer than `timeout_s`, with the end of its output.
    """
    busy_percent = psutil.cpu_percent(interval=2.0)
    log = BENCH / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
            problem = f"ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"took longer than --timeout-s {timeout_s:.0f}"
        finally:
            end(process)
    if problem:
        lines = log.read_text(errors="replace").splitlines()
        raise SystemExit("\n".join([f"{name} {problem}. The end of {log.relative_to(ROOT)}:", *lines[-20:]]))
    return busy_percent


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
    pip = [python, "-m", "pip", "-qq", "--disable-pip-version-check", "--no-input", "install"]
    for batch in (packages[:1], packages):
        subprocess.run([*pip, *shlex.split(os.environ.get("PIP_ARGS", "")), *batch], check=True)
    stamp.write_text("\n".join(packages))
    return python
