"""Reads a run directory, complete or incomplete, for the report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from penstock.dataflow.errors import PenstockError
from penstock.platform.metrics.leaves import value_at
from penstock.platform.metrics.run_files import (
    CONFIG_FILE,
    CONFIG_HISTORY_FILE,
    ENVIRONMENT_FILE,
    ERROR_FILE,
    EVALUATIONS_DIR,
    FAILURES_FILE,
    METRICS_FILE,
    STALENESS_FILE,
    SUMMARY_FILE,
    TIMELINE_FILE,
)
from penstock.platform.metrics.summary import RESUMED_FROM
from penstock.platform.metrics.timeline import read_timeline
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.metrics.trajectory_table import (
    TRAJECTORIES_DIR,
    iterate_trajectories,
    read_outcomes,
    spread_steps,
)

_MAX_STEPS_SHOWN = 8
_MAX_EVALUATIONS_SHOWN = 3
_MAX_STEPS_COUNTED = 60

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, PenstockError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the run: `steps[i] -> values[i]`. If a step was logged twice, the later value counts."""

    steps: list[int]
    values: list[float]


@dataclass(slots=True)
class RunRecord:
    """The contents of a run directory."""

    run_dir: Path
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration, nested dict; empty if missing."""
    summary: dict[str, Any] = field(default_factory=dict)
    """`summary.json`; empty if missing, or of an end after which the run was resumed."""
    series: dict[str, Series] = field(default_factory=dict)
    """Metric name -> its values over the steps."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Staleness in versions -> trained tokens; empty if missing."""
    trajectories: list[Path] = field(default_factory=list)
    """Files of at most eight evenly spaced steps, for `rows`."""
    outcomes: list[tuple[int, float | None, int]] = field(default_factory=list)
    """Step, reward and length (sampled tokens) of the sampled trajectories, of more of the steps."""
    answers: list[Path] = field(default_factory=list)
    """Files of at most three evaluations, for `rows`; empty if none are stored."""
    timeline: list[dict[str, Any]] = field(default_factory=list)
    """Events of `timeline.json`; empty if missing."""
    environment: dict[str, Any] = field(default_factory=dict)
    """`environment.json`: command, versions and machine; empty if missing."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Rows of `config_history.jsonl`: keys that were changed since the run began."""
    error: str = ""
    """What ended a failed run: the traceback and the newest events of the ledger; empty otherwise."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Kind and traceback of the first groups that failed."""
    missing: list[str] = field(default_factory=list)
    """One sentence per file that is missing or unreadable."""

    @property
    def evaluated_on(self) -> str | None:
        """The kind of tasks that evaluations measure, also of a run that has not ended; None: it has no evaluations."""
        if "evaluated_on" in self.summary or self.lookup("evaluation.num_tasks") == 0:
            kind: str | None = self.summary.get("evaluated_on")
            return kind
        trained, all_tasks = (self.values(f"eval/{name}")[-1:] for name in ("tasks_trained_on", "tasks"))
        if not any(trained):
            return "held-out"
        return "training" if trained == all_tasks else "held-out and training"

    def lookup(self, path: str) -> Any:
        """The configuration value at a dotted path, or None."""
        return value_at(self.config, path.split("."))

    def values(self, name: str) -> list[float]:
        """All values of one metric in step order; empty if it was never logged."""
        return self.series[name].values if name in self.series else []

    def rows(self, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
        """Rows of some of these files, those of the newest one first. One that cannot be read is told in `missing`."""
        for path in reversed(files):
            try:
                yield from iterate_trajectories(path)
            except _UNREADABLE as error:
                self.missing.append(f"{path.relative_to(self.run_dir)} cannot be read: {error}")

    def share_of_time(self, name: str, num_steps: int = 0) -> float | None:
        """Mean of a metric that is a share of each step, weighted by how long the steps took; None if none was logged.

        Args:
            name: Metric.
            num_steps: Of so many newest steps; 0: of all.
        """
        of_steps = self.series.get("throughput/step_s", Series([], []))
        seconds = dict(zip(of_steps.steps, of_steps.values, strict=True))
        shares = self.series.get(name, Series([], []))
        newest = zip(shares.steps[-num_steps:], shares.values[-num_steps:], strict=True)
        weighted = [(share, seconds[step]) for step, share in newest if step in seconds and math.isfinite(share)]
        total_s = sum(length_s for _, length_s in weighted)
        return sum(share * length_s for share, length_s in weighted) / total_s if total_s else None


def read_run(run_dir: Path) -> RunRecord:
    """Read all files that exist, but for the trajectories.

    Raises:
        PenstockError: If the directory does not exist or holds no file of a run.
    """
    if not run_dir.is_dir():
        raise PenstockError(f"{run_dir}: no such directory. Give the directory of a run, e.g. runs/arithmetic.")
    if not any((run_dir / name).exists() for name in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE)):
        raise PenstockError(
            f"{run_dir} is not a run: it has no {CONFIG_FILE}, {METRICS_FILE} or {SUMMARY_FILE}. "
            "Give the directory that `penstock train` printed, e.g. runs/arithmetic."
        )
    record = RunRecord(run_dir)
    record.config_text = _read(record, CONFIG_FILE, lambda path: path.read_text(encoding="utf-8")) or ""
    record.config = (_read(record, CONFIG_FILE, _read_mapping) or {}) if record.config_text else {}
    record.series = _read(record, METRICS_FILE, _read_series) or {}
    record.summary = _read(record, SUMMARY_FILE, _read_mapping, "the run has not finished") or {}
    record.staleness = _read(record, STALENESS_FILE, _read_staleness, "the run has not finished") or {}
    if (resumed_from := record.summary.get(RESUMED_FROM)) is not None:
        ended = f"{SUMMARY_FILE} and {STALENESS_FILE} are of an earlier end"
        record.missing.append(f"{ended}: the run was resumed from step {resumed_from}.")
        record.summary, record.staleness = {}, {}
    record.trajectories = _read(record, TRAJECTORIES_DIR, lambda path: spread_steps(path, _MAX_STEPS_SHOWN)) or []
    record.outcomes = _read(record, TRAJECTORIES_DIR, _read_outcomes, is_optional=True) or []
    # Not every run has these.
    record.answers = (
        _read(record, EVALUATIONS_DIR, lambda path: spread_steps(path, _MAX_EVALUATIONS_SHOWN), is_optional=True) or []
    )
    record.timeline = _read(record, TIMELINE_FILE, read_timeline, is_optional=True) or []
    record.environment = _read(record, ENVIRONMENT_FILE, _read_mapping, is_optional=True) or {}
    record.changes = _read(record, CONFIG_HISTORY_FILE, _read_lines, is_optional=True) or []
    record.error = _read(record, ERROR_FILE, lambda path: path.read_text(encoding="utf-8"), is_optional=True) or ""
    record.failures = _read(record, FAILURES_FILE, _read_failures, is_optional=True) or []
    return record


def _read(
    record: RunRecord, name: str, read: Callable[[Path], T], hint: str = "", *, is_optional: bool = False
) -> T | None:
    """Read one file; if it is missing or unreadable, add a sentence to `record.missing`."""
    path = record.run_dir / name
    if not path.exists() and is_optional:
        return None
    if not path.exists():
        record.missing.append(f"{name} is missing" + (f": {hint}." if hint else "."))
        return None
    try:
        return read(path)
    except _UNREADABLE as error:
        record.missing.append(f"{name} cannot be read: {error}")
        return None


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file."""
    text = path.read_text(encoding="utf-8")
    content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(content, dict):
        raise TypeError("it is no mapping")
    return content


def _read_staleness(path: Path) -> dict[int, int]:
    return {int(staleness): int(tokens) for staleness, tokens in _read_mapping(path).items()}


def _read_series(path: Path) -> dict[str, Series]:
    by_name: dict[str, dict[int, float]] = {}
    for record in read_metrics(path.parent):
        for name, value in record.metrics.items():
            by_name.setdefault(name, {})[record.step] = value
    return {name: Series(sorted(points), [points[step] for step in sorted(points)]) for name, points in by_name.items()}


def _read_outcomes(directory: Path) -> list[tuple[int, float | None, int]]:
    return [outcome for file in spread_steps(directory, _MAX_STEPS_COUNTED) for outcome in read_outcomes(file)]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last line break was cut off
    return [json.loads(line) for line in lines]


def _read_failures(path: Path) -> list[dict[str, Any]]:
    failures = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(failures, list):
        raise TypeError("it is no list")
    return failures
