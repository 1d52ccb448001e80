"""The metrics hub, through which the driver logs all metrics. Every name must be declared in `catalog.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
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
    """Every declared metric -> unit, meaning, healthy range and place of measurement, in the order of the file."""
    text = (Path(__file__).parent / "catalog.yaml").read_text(encoding="utf-8")
    declared: dict[str, dict[str, str]] = yaml.safe_load(text)
    return declared


def undeclared(names: Iterable[str]) -> list[str]:
    """The undeclared `names`, sorted. `reward/part/*` declares every name with that prefix."""
    prefixes = tuple(name[:-1] for name in catalog() if name.endswith("*"))

    def is_declared(name: str) -> bool:
        return name in catalog() or (name.startswith(prefixes) and name not in prefixes)

    return sorted(name for name in names if "*" in name or not is_declared(name))


class MetricsHub:
    """Passes metrics to the trackers and the console, and keeps the values that the summary needs.

    Steps never decrease, though several calls may share one, because some trackers silently discard late steps.

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
        """Record `family/name -> value` of one step. Step 0 is before the first training step.

        Raises:
            AssertionError: If `catalog.yaml` does not declare a name, or the step decreases. Both are bugs of Penstock.
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

    def roll_back(self, step: int, open_trackers: Callable[[], Sequence[Tracker]]) -> None:
        """Continue after `step`, since the training of later steps was lost; the sinks are opened again."""
        for tracker in self._trackers:
            tracker.close()
        self._trackers = tuple(open_trackers())
        self._last_step = min(self._last_step, step)

    def close(self, summary: RunSummary | None) -> None:
        """Pass the summary, if there is one, to all trackers and close them. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as closing:
            for tracker in self._trackers:
                closing.callback(tracker.close)
            if summary is not None:  # all of them work on it before one is waited for
                for tracker in self._trackers:
                    tracker.log_summary(summary.to_dict())
