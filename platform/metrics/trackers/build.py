"""Creates the trackers of `tracker=[jsonl,wandb,tensorboard,mlflow,trackio]`, and those of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from penstock.envs.import_path import load_object
from penstock.platform.metrics.trackers.base import BackgroundTracker, Tracker
from penstock.platform.metrics.trackers.config import FactoryTrackerConfig, TrackerConfig
from penstock.platform.metrics.trackers.jsonl import JsonlTracker, drop_later_records
from penstock.platform.metrics.trackers.mlflow import MlflowTracker
from penstock.platform.metrics.trackers.tensorboard import TensorboardTracker
from penstock.platform.metrics.trackers.trackio import TrackioTracker
from penstock.platform.metrics.trackers.wandb import WandbTracker, resolve_mode


def build_trackers(
    config: TrackerConfig,
    run_dir: Path,
    run_name: str,
    resolved_config: dict[str, Any],
    *,
    first_step: int = 0,
    lineage: Mapping[str, Any] | None = None,
) -> list[Tracker]:
    """Open the trackers of a run: JSONL synchronously, all others behind a bounded queue and a thread.

    Args:
        config: Which trackers are enabled.
        run_dir: Run directory, to which all files are written.
        run_name: Name of the run in the trackers.
        resolved_config: Composed configuration, shown by the trackers.
        first_step: First step of a resumed run; later records of the run before are dropped. 0 for a new run.
        lineage: Of a run that was branched from another one: `run` (its directory), `step` and `restored`.

    Raises:
        ConfigError: If W&B should log online and has no API key.
        TrackerError: If `run_dir` cannot be written.
    """
    logged_to = drop_later_records(run_dir, first_step) if first_step else -1
    opens: dict[str, Callable[[], Tracker]] = {}
    wandb, mlflow, trackio = config.wandb, config.mlflow, config.trackio
    if wandb is not None:
        mode = resolve_mode(wandb)
        opens["wandb"] = lambda: WandbTracker(wandb, mode, run_dir, run_name, resolved_config, lineage)
    if config.tensorboard is not None:
        opens["tensorboard"] = lambda: TensorboardTracker(run_dir)
    if mlflow is not None:
        opens["mlflow"] = lambda: MlflowTracker(mlflow, run_dir, run_name, resolved_config, lineage)
    if trackio is not None:
        opens["trackio"] = lambda: TrackioTracker(trackio, run_dir, run_name, resolved_config, lineage)
    of_user = resolved_config | ({} if lineage is None else {"branched_from": dict(lineage)})
    for name, own in config.own.items():
        opens[name] = partial(_open, name, own, run_dir, run_name, of_user)
    background = [BackgroundTracker(name, open_sink, logged_to=logged_to) for name, open_sink in opens.items()]
    return [JsonlTracker(run_dir), *background]


def _open(name: str, own: FactoryTrackerConfig, run_dir: Path, run_name: str, config: dict[str, Any]) -> Tracker:
    """Open a tracker of the user."""
    factory = load_object(own.factory, f"tracker.{name}.factory")
    return cast("Tracker", factory(run_dir, run_name, config, **own.args))
