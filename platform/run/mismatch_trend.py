"""Trend of the logprob mismatch between engine and trainer over a run.

Symbols: m_t = `mismatch/abs_logprob_mean` of step t; W = steps per window. The trend is the mean of the newest W steps
divided by max(mean of the first W steps, `MIN_MISMATCH_NATS`): 1 is a constant mismatch, 3 one that has tripled.
Windows are averaged because m_t depends on the batch of its step. An implementation difference that training amplifies
grows for hundreds of steps before the reward shows it. The logprob parity check compares one version at a time, so it
sees only differences above rounding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

SOURCE = "mismatch/abs_logprob_mean"
METRIC = "mismatch/trend"
WINDOW_STEPS = 20
WARNING_RATIO = 3.0
MIN_MISMATCH_NATS = 1e-5
"""Below this value the mismatch is float32 rounding, whose growth is meaningless."""


class MismatchTrend:
    """Tracks the mismatch of one policy. Warns when the trend reaches `WARNING_RATIO` and at each later doubling."""

    def __init__(self) -> None:
        self._first_window: list[float] = []
        self._newest_window = deque[float](maxlen=WINDOW_STEPS)
        self._warning_threshold = WARNING_RATIO

    def state_dict(self) -> dict[str, Any]:
        """Both windows and the threshold, as JSON types."""
        return {
            "first": list(self._first_window),
            "newest": list(self._newest_window),
            "threshold": self._warning_threshold,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first_window = list(state["first"])
        self._newest_window.extend(state["newest"])
        self._warning_threshold = state["threshold"]

    def observe(self, version: int, metrics: Mapping[str, float], max_staleness: int) -> tuple[dict[str, float], str]:
        """Record one step.

        Args:
            version: Policy version, named in the warning.
            metrics: Metrics of the step. Steps without a finite mismatch (skipped, nothing sampled) are not counted.
            max_staleness: Staleness of the oldest token, in versions. Above 0, policy updates add to the mismatch.

        Returns:
            The trend metric, empty until both windows are full, and a warning, usually empty.
        """
        if not math.isfinite(metrics.get(SOURCE, math.nan)):
            return {}, ""
        if len(self._first_window) < WINDOW_STEPS:
            self._first_window.append(metrics[SOURCE])
            return {}, ""
        self._newest_window.append(metrics[SOURCE])
        if len(self._newest_window) < WINDOW_STEPS:
            return {}, ""
        before, now = fmean(self._first_window), fmean(self._newest_window)
        trend = now / max(before, MIN_MISMATCH_NATS)
        if trend < self._warning_threshold:
            return {METRIC: trend}, ""
        self._warning_threshold = 2.0 * trend
        explanation = (
            "engine and trainer use the same weights, so their implementations differ"
            if max_staleness == 0
            else f"at staleness {max_staleness} faster policy updates explain part of it, so compare with a run with "
            "dataflow.max_staleness=0"
        )
        return {METRIC: trend}, (
            f"v{version}: {SOURCE} has risen from {before:.2g} (first {WINDOW_STEPS} steps) to {now:.2g} nat (newest), "
            f"{trend:.1f} times; {explanation}. See docs/debugging.md, mismatch rises"
        )
