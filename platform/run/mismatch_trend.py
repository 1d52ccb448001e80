"""Does the mismatch of engine and trainer grow over a run?

Symbols: m_t = `mismatch/abs_logprob_mean` of step t; W = steps of a window. The trend is the mean of the newest W steps
÷ that of the first W or `MIN_NAT`, whichever is larger: 1 is a mismatch that stays, 3 one that has tripled. Means,
since the m of one step depends on its batch. A difference of implementations that training amplifies grows for hundreds
of steps before a reward shows it, and the ratio probe sees only what is above rounding at one version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

SOURCE = "mismatch/abs_logprob_mean"
METRIC = "mismatch/trend"
WINDOW_STEPS = 20
WARNING_RATIO = 3.0
MIN_NAT = 1e-5
"""Below it rounding in float32 is all there is, and its growth means nothing."""


class MismatchTrend:
    """Follows one policy's mismatch. Warns when it first passes `WARNING_RATIO`, and whenever it has doubled since."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._newest = deque[float](maxlen=WINDOW_STEPS)
        self._warns_at = WARNING_RATIO

    def observe(self, version: int, metrics: Mapping[str, float], max_staleness: int) -> tuple[dict[str, float], str]:
        """Take in a step.

        Args:
            version: For the warning.
            metrics: Of the step; one without a mismatch (skipped, nothing sampled) does not count.

            max_staleness: Staleness of the step's oldest token, versions: what else the mismatch holds.

        Returns:
            The trend, once two windows are full; and a warning, mostly empty.
        """
        if SOURCE not in metrics:
            return {}, ""
        if len(self._first) < WINDOW_STEPS:
            self._first.append(metrics[SOURCE])
            return {}, ""
        self._newest.append(metrics[SOURCE])
        if len(self._newest) < WINDOW_STEPS:
            return {}, ""
        before, now = fmean(self._first), fmean(self._newest)
        trend = now / max(before, MIN_NAT)
        if trend < self._warns_at:
            return {METRIC: trend}, ""
        self._warns_at = 2.0 * trend
        explanation = (
            "it is engine against trainer alone, so one of them computes something else"
            if max_staleness == 0
            else f"at staleness {max_staleness} a policy that changes faster explains a part, so compare a run with "
            "dataflow.max_staleness=0"
        )
        return {METRIC: trend}, (
            f"v{version}: {SOURCE} has risen from {before:.2g} (first {WINDOW_STEPS} steps) to {now:.2g} nat (newest), "
            f"{trend:.1f} times; {explanation}. See docs/debugging.md, mismatch rises"
        )
