"""Inspection of a run directory: whether a new run may use it, and whether its run is finished."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from penstock.dataflow.errors import PenstockError
from penstock.envs.fingerprint import Fingerprint, fingerprints
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.leaves import scalars
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
    if outer := next((folder for folder in run_dir.absolute().parents if is_run_dir(folder)), None):
        return (
            f"run_dir={run_dir} is inside {outer}, the directory of another run, which may delete it. Use a directory "
            "beside that one."
        )
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
    return next(_would_be_lost(config, run_dir), None)


def _would_be_lost(config: RunConfig, run_dir: Path) -> Iterator[str]:
    """Yield what overwrite=true would delete besides an earlier run of the same name."""
    for key, value in scalars(config.model_dump(mode="json", exclude={"run_dir"})):
        if not isinstance(value, str) or not value:
            continue
        path = Path.home() / value[2:] if value.startswith("~/") else Path(value)
        if value.isprintable() and path.absolute().is_relative_to(run_dir.absolute()) and path.exists():
            yield (
                f"run_dir={run_dir} with overwrite=true would delete {key}={value}, which this run reads. Use another "
                "run_dir or name."
            )
    inner = [path.parent for path in (*run_dir.glob("*/*"), *run_dir.glob("*/*/*")) if path.name == ENVIRONMENT_FILE]
    if inner:
        yield (
            f"run_dir={run_dir} with overwrite=true would delete {len(inner)} other runs inside it, such as "
            f"{inner[0]}. Use another run_dir, or delete them yourself."
        )
    try:
        earlier = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return  # it was killed before it had written its configuration, or the file is broken
    if earlier != config.name:
        yield (
            f"run_dir={run_dir} holds the run {earlier}, and this one is name={config.name}: overwrite=true replaces "
            f"only a run of the same name. Use another run_dir, name={earlier}, or delete it yourself."
        )


def is_unfinished_warm_start(folder: Path) -> bool:
    """Whether it is the directory of a supervised warm start that was ended early. Other runs have a summary."""
    return is_run_dir(folder) and not (folder / FINISHED_FILE).exists() and not (folder / SUMMARY_FILE).exists()


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
