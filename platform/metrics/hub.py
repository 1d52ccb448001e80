"""The one place through which every metric leaves the driver. Every name is declared, once: in `catalog.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from penstock.platform.metrics.summary import RunSummary
from penstock.platform.metrics.trackers.base import Tracker

if TYPE_CHECKING:
    from penstock.platform.metrics.console import RunConsole


@cache
def catalog() -> dict[str, dict[str, str]]:
    """Every declared metric -> its unit, meaning, healthy range and where it is measured, in the order of the page."""
    text = (Path(__file__).parent / "catalog.yaml").read_text(encoding="utf-8")
    declared: dict[str, dict[str, str]] = yaml.safe_load(text)
    return declared


def undeclared(names: Iterable[str]) -> list[str]:
    """Those of `names` that no declaration covers, sorted; `reward/part/*` covers every name with that prefix."""
    prefixes = tuple(name[:-1] for name in catalog() if name.endswith("*"))

    def is_declared(name: str) -> bool:
        return name in catalog() or (name.startswith(prefixes) and name not in prefixes)

    return sorted(name for name in names if "*" in name or not is_declared(name))


class MetricsHub:
    """Fan metrics out to the sinks and the console, and keep what the summary needs.

    Steps never decrease (several calls may share one), because some sinks silently discard late ones.

    Attributes:
        rewards: `reward/mean` of every step so far.
    """

    def __init__(self, trackers: Sequence[Tracker], console: RunConsole | None = None) -> None:
        self._trackers = tuple(trackers)
        self._console = console
        self.rewards: list[float] = []
        self._last_step = 0
        self._is_closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `family/name -> value` of one step; step 0 is before the first.

        Raises:
            AssertionError: Our bug: a name that `catalog.yaml` does not declare, or a step that goes backwards.
        """
        unknown = undeclared(metrics)
        if unknown:
            raise AssertionError(f"metrics logged but not declared in catalog.yaml: {', '.join(unknown)}")
        if step < self._last_step:
            raise AssertionError(f"metrics of step {step} logged after those of step {self._last_step}")
        self._last_step = step
        values = {name: float(value) for name, value in metrics.items()}
        if "reward/mean" in values:
            self.rewards.append(values["reward/mean"])
        for tracker in self._trackers:
            tracker.log(step, values)
        if self._console is not None:
            self._console.observe(step, values)

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
