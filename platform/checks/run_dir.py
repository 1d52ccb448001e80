"""Inspection of a run directory: whether a new run may use it, and whether its run is finished."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.dataflow.errors import PenstockError
from penstock.envs.fingerprint import Fingerprint, fingerprints
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.run_files import (
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    FINISHED_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
)

_WRITTEN_BY_A_RUN = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, SUMMARY_FILE)


def occupied(config: RunConfig) -> str | None:
    """Return why the run directory cannot be used for a new run; None if it can."""
    run_dir = Path(config.run_dir)
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return None
    if not config.overwrite:
        return (
            f"run_dir={run_dir} exists and is not empty: a run does not share a directory with another one. Use "
            "overwrite=true to delete it, or a new name=..."
        )
    if not any((run_dir / name).exists() for name in _WRITTEN_BY_A_RUN):
        return (
            f"run_dir={run_dir} has files, but none that a run writes ({', '.join(_WRITTEN_BY_A_RUN)}): "
            "overwrite=true deletes only runs. Use another run_dir, or delete it yourself."
        )
    return None


def is_finished(config: RunConfig) -> bool:
    """Whether the run directory holds a finished run of the same configuration on unchanged data."""
    marker = Path(config.run_dir) / FINISHED_FILE
    if not marker.exists() or marker.read_text() != essence(config):
        return False
    try:
        return read_data(Path(config.run_dir)) == fingerprints(config.env, config.seed)
    except (PenstockError, OSError, ValueError):
        return False  # the checks of the task source report why it cannot be read


def is_run_dir(folder: Path) -> bool:
    """Whether a folder is the directory of a run."""
    return all((folder / name).exists() for name in (CONFIG_FILE, ENVIRONMENT_FILE, DATA_FILE))


def read_data(run_dir: Path) -> dict[str, Fingerprint]:
    """Return the fingerprints of a run's data; empty if the folder is not a run."""
    path = run_dir / DATA_FILE
    found: dict[str, Fingerprint] = json.loads(path.read_text()) if path.exists() else {}
    return found


def essence(config: RunConfig) -> str:
    """Return the configuration as text, without the keys that only control the handling of an old run."""
    sft = None if config.sft is None else config.sft.model_copy(update={"reuse": False})
    return to_yaml(config.model_copy(update={"overwrite": False, "resume": "never", "sft": sft}))
