"""A growing mismatch causes a warning; a constant one, or one of rounding only, does not."""

from __future__ import annotations

import math

import pytest

from penstock.platform.run.mismatch_trend import METRIC, MIN_MISMATCH_NATS, SOURCE, WINDOW_STEPS, MismatchTrend


def followed(values: list[float], max_staleness: int = 0) -> tuple[list[float], list[str]]:
    trend, trends, warnings = MismatchTrend(), [], []
    for version, value in enumerate(values):
        metrics, warning = trend.observe(version, {SOURCE: value}, max_staleness)
        trends += [metrics[METRIC]] if metrics else []
        warnings += [warning] if warning else []
    return trends, warnings


def test_it_is_the_newest_window_over_the_first_one() -> None:
    trends, warnings = followed([0.01] * WINDOW_STEPS + [0.02] * WINDOW_STEPS + [0.01] * WINDOW_STEPS)
    assert len(trends) == WINDOW_STEPS + 1, "from two full windows on"
    assert trends[0] == pytest.approx(2.0)
    assert trends[WINDOW_STEPS // 2] == pytest.approx(1.5)
    assert trends[-1] == pytest.approx(1.0)
    assert warnings == []


def test_a_rise_is_warned_of_once_and_again_when_it_has_doubled() -> None:
    rising = [0.01] * WINDOW_STEPS + [0.01 * 1.05**step for step in range(80)]
    trends, warnings = followed(rising)
    assert trends == sorted(trends)
    first = next(trend for trend in trends if trend >= 3.0)
    expected = [first]
    for trend in trends:
        if trend >= 2 * expected[-1]:
            expected.append(trend)
    assert len(expected) > 2
    assert [
        f"{trend:.1f} times; engine and trainer use the same weights" in said
        for trend, said in zip(expected, warnings, strict=True)
    ] == [True] * len(expected)
    assert "from 0.01 (first 20 steps) to 0.03" in warnings[0]


def test_with_staleness_other_causes_are_named() -> None:
    _, (warning,) = followed([0.01] * WINDOW_STEPS + [0.04] * WINDOW_STEPS, max_staleness=4)
    assert "at staleness 4 faster policy updates explain part of it" in warning


def test_rounding_that_grows_is_nothing() -> None:
    trends, warnings = followed([1e-8] * WINDOW_STEPS + [2 * MIN_MISMATCH_NATS] * WINDOW_STEPS)
    assert trends == [pytest.approx(2.0)]
    assert warnings == []


def test_steps_without_a_mismatch_do_not_count() -> None:
    trend = MismatchTrend()
    for version in range(2 * WINDOW_STEPS - 1):
        assert trend.observe(version, {SOURCE: 1.0}, 0) == ({}, "")
        assert trend.observe(version, {"loss/policy": 1.0}, 0) == ({}, "")
        assert trend.observe(version, {SOURCE: math.nan}, 0) == ({}, "")
    assert trend.observe(99, {SOURCE: 1.0}, 0) == ({METRIC: 1.0}, "")
