"""Weights & Biases. Only this file imports wandb, and only in runs that use it."""

from __future__ import annotations

import netrc
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

from penstock.dataflow.errors import ConfigError
from penstock.platform.metrics.trackers.base import kept_id, with_parent
from penstock.platform.metrics.trackers.run_artifacts import COLUMNS, run_artifacts, transcripts

if TYPE_CHECKING:
    from penstock.platform.metrics.trackers.config import WandbTrackerConfig

WandbMode = Literal["online", "offline"]

_DEFAULT_BASE_URL = "https://api.wandb.ai"
_STEP = "step"
RUN_ID_FILE = "wandb_run_id"
_MAX_TAG_CHARACTERS = 64


def resolve_mode(config: WandbTrackerConfig, environ: Mapping[str, str] = os.environ) -> WandbMode:
    """Turn `mode: auto` into `online` with an API key and `offline` without one.

    Raises:
        ConfigError: If the mode is `online` and there is no API key, for which wandb would prompt.
    """
    if config.mode == "offline" or environ.get("WANDB_MODE") in {"offline", "dryrun"}:
        return "offline"
    has_key = has_api_key(environ)
    if config.mode == "online" and not has_key:
        raise ConfigError(
            [
                "tracker.wandb.mode='online' but there is no API key: wandb could not log in. "
                "Run `wandb login`, set WANDB_API_KEY, or use mode 'auto' or 'offline'."
            ]
        )
    return "online" if has_key else "offline"


def has_api_key(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether WANDB_API_KEY is set or the netrc file has an entry for the W&B server."""
    if environ.get("WANDB_API_KEY"):
        return True
    home = Path(environ.get("HOME", str(Path.home())))
    path = Path(environ["NETRC"]) if environ.get("NETRC") else home / ".netrc"
    host = urlsplit(environ.get("WANDB_BASE_URL") or _DEFAULT_BASE_URL).hostname or ""
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbTracker:
    """One W&B run, written only by this object.

    Every metric is plotted over `step` (`define_metric`). wandb's own step counter is not used, because it silently
    discards records that arrive out of order. With the summary the run gets an artifact of type `run` (the page, the
    configuration and tables as parquet, see run_artifacts.py) and the table `transcripts`.
    """

    def __init__(
        self,
        config: WandbTrackerConfig,
        mode: WandbMode,
        run_dir: Path,
        run_name: str,
        resolved_config: dict[str, Any],
        lineage: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the run.

        Args:
            config: Project and entity.
            mode: `offline` writes below `run_dir/wandb`, for `wandb sync`.
            run_dir: The run's directory.
            run_name: Shown in the W&B table.
            resolved_config: Composed configuration, nested dict.
            lineage: What the run was branched from, if it was; part of the W&B configuration as `branched_from`.
        """
        import wandb

        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir, self._mode, self._last_step = run_dir, mode, 0
        branched_from = with_parent(lineage, RUN_ID_FILE)
        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            name=run_name,
            id=kept_id(run_dir / RUN_ID_FILE, uuid4().hex[:12]),
            resume="allow",
            dir=str(run_dir),
            mode=mode,
            config=resolved_config | ({"branched_from": branched_from} if branched_from else {}),
            tags=_tags(branched_from),
            settings=wandb.Settings(console="off", silent=True, init_timeout=60),
        )
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass one record to wandb."""
        self._last_step = step
        self._run.log({_STEP: step, **metrics})

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Set the run's summary figures, then log the table of transcripts and the artifact."""
        import wandb

        self._run.summary.update(dict(summary))
        if rows := transcripts(self._run_dir):
            table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
            self._run.log({_STEP: self._last_step, "transcripts": table})
        artifact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for path in run_artifacts(self._run_dir, "wandb"):
            name, source = path.relative_to(self._run_dir), path
            if self._mode == "offline":  # `wandb sync` comes later, and a resumed run writes some of the files again
                source = Path(self._run.dir).parent / "artifact" / name
                source.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, source)
            artifact.add_file(str(source), name=str(name), policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        """Finish the run and end wandb's own background process."""
        import wandb

        self._run.finish()
        wandb.teardown()


def _tags(branched_from: Mapping[str, Any]) -> list[str] | None:
    if not branched_from:
        return None
    parent, step = Path(str(branched_from["run"])).name, branched_from["step"]
    return [f"branch of {parent}"[:_MAX_TAG_CHARACTERS], f"from step {step}"]
