"""MLflow. Only this file imports mlflow, which the extra `mlflow` installs, and only in runs that use it.

The store is the server of MLFLOW_TRACKING_URI, or else `mlflow/mlflow.db` in the run directory, with the artifacts next
to it. It is a database, because MLflow's folders of files cannot hold a metric `eval/accuracy` and another one
`eval/accuracy/NAME`, and MLflow has given them up.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.platform.metrics.leaves import leaves
from penstock.platform.metrics.trackers.base import flat_summary, with_parent
from penstock.platform.metrics.trackers.run_artifacts import run_artifacts

if TYPE_CHECKING:
    from penstock.platform.metrics.trackers.config import MlflowTrackerConfig

logger = logging.getLogger(__name__)

RUN_ID_FILE = "mlflow_run_id"
FOLDER = "mlflow"
"""In the run directory: the database and the artifacts, unless MLFLOW_TRACKING_URI names a server."""
_NOT_IN_A_NAME = re.compile(r"[^\w.\- :/]")
_MAX_NAME_CHARACTERS = 250
_STATUS = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """One MLflow run, written only by this object.

    Parameters are the configuration, as `trainer.optimizer.lr`; those that a resumed run has changed keep their first
    value, as MLflow demands, and are named in the tag `penstock.changed`. The summary becomes metrics `summary/…`, and
    tags where it is text.
    """

    def __init__(
        self,
        config: MlflowTrackerConfig,
        run_dir: Path,
        run_name: str,
        resolved_config: dict[str, Any],
        lineage: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the run, or the one that `mlflow_run_id` in the run directory names.

        Args:
            config: The experiment.
            run_dir: The run's directory.
            run_name: Shown by MLflow.
            resolved_config: Composed configuration, nested dict.
            lineage: What the run was branched from, if it was: tags `branched_from.…`. If the parent is in the same
                store, the run is shown below it.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)  # making the database would be some lines
        self._run_dir, self._status, self._last_step = run_dir, "FINISHED", 0
        folder = (run_dir / FOLDER).absolute()
        is_local = not os.environ.get("MLFLOW_TRACKING_URI")
        if is_local:
            folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}" if is_local else None)
        path = run_dir / RUN_ID_FILE
        known = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        try:
            run = self._client.get_run(known) if known else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("tracker mlflow: its run %s is not in this store; a new run is logged.", known)
            run = None
        if run is None:
            experiment = self._experiment(config.experiment, (folder / "artifacts").as_uri() if is_local else None)
            run = self._client.create_run(experiment, run_name=run_name)
            path.write_text(run.info.run_id, encoding="utf-8")
        self._run_id = run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_parameters(dict(leaves(resolved_config)), run.data.params)
        self._log_lineage(with_parent(lineage, RUN_ID_FILE))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one batch of metrics."""
        self._last_step = step
        self._log_metrics(metrics)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log the figures of the summary, then upload the page and the tables."""
        self._status = _STATUS.get(str(summary.get("status")), "FINISHED")
        figures, texts = flat_summary(summary)
        self._log_metrics(figures)
        self._set_tags(texts)
        for path in run_artifacts(self._run_dir, "mlflow"):
            folder = path.parent.relative_to(self._run_dir).as_posix()
            self._client.log_artifact(self._run_id, str(path), None if folder == "." else folder)

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run_id, status=self._status)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """Id of the experiment, which is made if there is none."""
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name, artifacts))

    def _log_metrics(self, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        now_ms = round(1000 * time.time())
        all_of_them = [Metric(valid_name(name), value, now_ms, self._last_step) for name, value in metrics.items()]
        for batch in _batches(all_of_them, MAX_METRICS_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=batch)

    def _log_parameters(self, values: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Log what is not known yet; says how many values are longer than MLflow allows."""
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        texts = {valid_name(name): _text(value) for name, value in values.items()}
        cut = [name for name, text in texts.items() if len(text) > MAX_PARAM_VAL_LENGTH]
        texts |= {name: texts[name][:MAX_PARAM_VAL_LENGTH] for name in cut}
        fresh = [Param(name, text) for name, text in texts.items() if name not in known]
        for batch in _batches(fresh, MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(self._run_id, params=batch)
        changed = [f"{name}={text}" for name, text in texts.items() if known.get(name, text) != text]
        self._set_tags({"penstock.changed": ", ".join(changed)} if changed else {})
        if cut:
            self._set_tags({"penstock.cut": ", ".join(cut)})
            logger.warning(
                "tracker mlflow: %d of %d values of the configuration are longer than MLflow's limit of %d characters "
                "and cut there: %s. config.yaml, an artifact of the run, has them whole.",
                len(cut),
                len(texts),
                MAX_PARAM_VAL_LENGTH,
                ", ".join(cut[:5]) + (", …" if len(cut) > 5 else ""),
            )

    def _log_lineage(self, branched_from: Mapping[str, Any]) -> None:
        from mlflow.exceptions import MlflowException

        self._set_tags({f"branched_from.{name}": value for name, value in branched_from.items()})
        if parent := branched_from.get(RUN_ID_FILE):
            try:
                self._client.get_run(parent)
            except MlflowException:
                return  # in the database of its own directory, or on another server
            self._set_tags({"mlflow.parentRunId": parent})

    def _set_tags(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag
        from mlflow.utils.validation import MAX_PARAMS_TAGS_PER_BATCH, MAX_TAG_VAL_LENGTH

        entities = [RunTag(valid_name(name), _text(value)[:MAX_TAG_VAL_LENGTH]) for name, value in tags.items()]
        for batch in _batches(entities, MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(self._run_id, tags=batch)


def valid_name(name: str) -> str:
    """A name that MLflow takes: letters, digits and `_-. :`, between slashes; no part is empty or only dots."""
    parts = (_NOT_IN_A_NAME.sub("_", part) for part in name.split("/"))
    return "/".join(part if part.strip(".") else "_" for part in parts)[:_MAX_NAME_CHARACTERS].rstrip("/")


def _text(value: Any) -> str:
    """As in YAML: lists, numbers, true, false and null as in JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _batches(entities: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (entities[first : first + size] for first in range(0, len(entities), size))
