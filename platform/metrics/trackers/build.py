"""Creates the trackers of `tracker=[jsonl,wandb,tensorboard]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.platform.metrics.trackers.base import BackgroundTracker, Tracker
from penstock.platform.metrics.trackers.config import TrackerConfig
from penstock.platform.metrics.trackers.jsonl import JsonlTracker, drop_later_records
from penstock.platform.metrics.trackers.tensorboard import TensorboardTracker
from penstock.platform.metrics.trackers.wandb import WandbTracker, resolve_mode


def build_trackers(
    config: TrackerConfig, run_dir: Path, run_name: str, resolved_config: dict[str, Any], *, first_step: int = 0
) -> list[Tracker]:
    """Open the trackers of a run: JSONL synchronously, all others behind a bounded queue and a thread.

    Args:
        config: Which trackers are enabled.
        run_dir: Run directory, to which all files are written.
        run_name: Name of the run in W&B.
        resolved_config: Composed configuration, shown in W&B.
        first_step: First step of a resumed run; later records of the run before are dropped. 0 for a new run.

    Raises:
        ConfigError: If W&B should log online and has no API key.
        TrackerError: If `run_dir` cannot be written.
    """
    logged_to = drop_later_records(run_dir, first_step) if first_step else -1
    trackers: list[Tracker] = []
    wandb = config.wandb
    if wandb is not None:
        mode = resolve_mode(wandb)
        trackers.append(
            BackgroundTracker(
                "wandb",
                lambda: WandbTracker(wandb, mode, run_dir, run_name, resolved_config),
                logged_to=logged_to,
            )
        )
    if config.tensorboard is not None:
        trackers.append(BackgroundTracker("tensorboard", lambda: TensorboardTracker(run_dir), logged_to=logged_to))
    return [JsonlTracker(run_dir), *trackers]
