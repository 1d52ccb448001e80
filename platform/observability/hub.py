"""The one place through which every metric leaves the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.platform.observability.catalog import undeclared
from penstock.platform.observability.summary import RunSummary
from penstock.platform.trackers.base import Tracker

if TYPE_CHECKING:
    from penstock.platform.observability.console import RunConsole

_HISTORY = ("reward/mean", "eval/accuracy")


class MetricsHub:
    """Fan metrics out to the sinks and the console, and keep what the summary needs.

    Steps never decrease (several calls may share one), because some sinks silently discard late ones.
    """

    def __init__(self, trackers: Sequence[Tracker], console: RunConsole | None = None) -> None:
        self._trackers = tuple(trackers)
        self._console = console
        self._history: dict[str, list[tuple[int, float]]] = {name: [] for name in _HISTORY}
        self._last_step = 0
        self._is_closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `family/name -> value` of one step; step 0 is before the first.

        Raises:
            AssertionError: Our bug: a name that `metrics.yaml` does not declare, or a step that goes backwards.
        """
        unknown = undeclared(metrics)
        if unknown:
            raise AssertionError(f"metrics logged but not declared in metrics.yaml: {', '.join(unknown)}")
        if step < self._last_step:
            raise AssertionError(f"metrics of step {step} logged after those of step {self._last_step}")
        self._last_step = step
        values = {name: float(value) for name, value in metrics.items()}
        for name in _HISTORY:
            if name in values:
                self._history[name].append((step, values[name]))
        for tracker in self._trackers:
            tracker.log(step, values)
        if self._console is not None:
            self._console.observe(step, values)

    def series(self, name: str) -> list[tuple[int, float]]:
        """All `(step, value)` of `reward/mean` or `eval/accuracy`, the names whose history is kept."""
        return list(self._history[name])

    def close(self, summary: RunSummary | None) -> None:
        """Hand the summary to every sink and close them all; None for a run that has none. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for tracker in self._trackers:
            try:
                if summary is not None:
                    tracker.log_summary(summary.to_dict())
            finally:
                tracker.close()
