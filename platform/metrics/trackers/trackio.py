"""Trackio. Only this file imports trackio, which the extra `trackio` installs, and only in runs that use it.

Where the run is logged is Trackio's own affair: its folder (TRACKIO_DIR), a Space (TRACKIO_SPACE_ID) or a server
(TRACKIO_SERVER_URL). If the latter two cannot be reached, Trackio keeps the records and sends them later.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from penstock.platform.metrics.trackers.base import flat_summary, kept_id, with_parent

if TYPE_CHECKING:
    from penstock.platform.metrics.trackers.config import TrackioTrackerConfig

logger = logging.getLogger(__name__)

RUN_NAME_FILE = "trackio_run"


class TrackioTracker:
    """One Trackio run, written only by this object.

    Trackio continues a run by its name alone, and runs of several directories may have the same name. So the name gets
    a few random characters, and is kept in the run's directory, so that a resumed run continues it.
    """

    def __init__(
        self,
        config: TrackioTrackerConfig,
        run_dir: Path,
        run_name: str,
        resolved_config: dict[str, Any],
        lineage: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the run.

        Args:
            config: The project.
            run_dir: The run's directory.
            run_name: Beginning of the name in Trackio.
            resolved_config: Composed configuration, nested dict.
            lineage: What the run was branched from, if it was; part of Trackio's configuration as `branched_from`.
        """
        import trackio

        for name in ("trackio", "trackio.run", "trackio.utils"):  # what they print would be between the run's own lines
            vars(importlib.import_module(name))["print"] = _quiet
        branched_from = with_parent(lineage, RUN_NAME_FILE)
        self._run: Any = trackio.init(
            config.project,
            kept_id(run_dir / RUN_NAME_FILE, f"{run_name}-{uuid4().hex[:6]}"),
            config=resolved_config | ({"branched_from": branched_from} if branched_from else {}),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._last_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass one record to Trackio."""
        self._last_step = step
        self._run.log(dict(metrics), step=step)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log the figures as `summary/<key>` at the last step; Trackio has no summary. `summary.json` has all of it."""
        self._run.log(flat_summary(summary)[0], step=self._last_step)

    def close(self) -> None:
        """Send what is queued and end the run."""
        self._run.finish()


def _quiet(*words: object, **_: object) -> None:
    logger.debug("trackio: %s", " ".join(map(str, words)))
