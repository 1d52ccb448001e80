"""Creates the trackers of `tracker=[jsonl,wandb,tensorboard]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.platform.metrics.trackers.base import BackgroundTracker, Tracker
from penstock.platform.metrics.trackers.config import TrackerConfig
from penstock.platform.metrics.trackers.jsonl import JsonlTracker
from penstock.platform.metrics.trackers.tensorboard import TensorboardTracker
from penstock.platform.metrics.trackers.wandb import WandbTracker, resolve_mode


def build_trackers(
    config: TrackerConfig, run_dir: Path, run_name: str, resolved_config: dict[str, Any]
) -> list[Tracker]:
    """Open the trackers of a run: JSONL synchronously, all others behind a bounded queue and a thread.

    Args:
        config: Which trackers are enabled.
        run_dir: Run directory, to which all files are written.
        run_name: Name of the run in W&B.
        resolved_config: Composed configuration, shown in W&B.

    Raises:
        ConfigError: If W&B should log online and has no API key.
        TrackerError: If `run_dir` cannot be written.
    """
    trackers: list[Tracker] = []
    wandb = config.wandb
    if wandb is not None:
        mode = resolve_mode(wandb)
        trackers.append(
            BackgroundTracker("wandb", lambda: WandbTracker(wandb, mode, run_dir, run_name, resolved_config))
        )
    if config.tensorboard is not None:
        trackers.append(BackgroundTracker("tensorboard", lambda: TensorboardTracker(run_dir)))
    return [JsonlTracker(run_dir), *trackers]
