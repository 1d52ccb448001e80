"""From `tracker=[jsonl,wandb,tensorboard]` to open sinks."""

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
    """Open the sinks of a run: JSONL in line, all others behind a bounded queue and a thread.

    Args:
        config: Which sinks are on.
        run_dir: Everything is written below it.
        run_name: How the run is called in W&B.
        resolved_config: Composed configuration, shown in W&B.

    Raises:
        ConfigError: W&B is to log online and has no API key.
        TrackerError: `run_dir` cannot be written.
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
