"""TensorBoard event files, written with tensorboard's own writer, so that the driver does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.platform.metrics.trackers.base import flat_summary

TENSORBOARD_DIR = "tensorboard"


class TensorboardTracker:
    """Writes scalars to `run_dir/tensorboard`, one tag per metric name."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer

        directory = run_dir / TENSORBOARD_DIR
        directory.mkdir(parents=True, exist_ok=True)
        self._writer: Any = Writer(str(directory))
        self._last_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric."""
        self._last_step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the numeric figures as `summary/<key>` at the last step. `summary.json` has all figures."""
        for name, value in flat_summary(summary)[0].items():
            self._writer.add_scalar(name, value, self._last_step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
