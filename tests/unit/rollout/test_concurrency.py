"""Additive increase, multiplicative decrease: an engine short of cache holds fewer requests, and gets them back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import EngineLoad
from penstock.platform.run.engine_monitor import EngineMonitor
from penstock.rollout.engine_pool.concurrency import CUT, HIGH_USAGE, LOW_USAGE, STEP, ConcurrencyLimit
from penstock.rollout.engine_pool.pool import EnginePool
from tests.fakes import FakeEngine

IDLE = EngineLoad(0, num_running=0, num_waiting=0, kv_cache_usage=0.0, tokens_generated=0, busy_s=0.0)


def load(held: int, usage: float = 0.5, preemptions: int = 0) -> EngineLoad:
    return replace(IDLE, num_running=held, kv_cache_usage=usage, num_preemptions=preemptions)


def test_an_engine_that_is_never_short_is_never_held_back() -> None:
    limit = ConcurrencyLimit.starting(64)
    assert [limit.observe(load(held)) for held in (0, 10, 64, 64)] == [64] * 4


@pytest.mark.parametrize("short", [load(50, HIGH_USAGE + 0.01), load(50, 0.9, preemptions=1)])
def test_a_full_cache_or_a_preemption_cuts_what_it_holds_by_a_fifth(short: EngineLoad) -> None:
    limit = ConcurrencyLimit.starting(64)
    assert limit.observe(short) == 40


def test_one_shortage_is_answered_once_until_the_cut_has_shown() -> None:
    limit = ConcurrencyLimit.starting(64)
    answers = [limit.observe(load(held, 0.99, preemptions=64 - held)) for held in (60, 58, 52, 49)]
    assert answers == [48, 48, 48, 48]
    assert limit.observe(load(48, 0.99, preemptions=20)) == int(48 * CUT)


def test_a_preemption_counts_once() -> None:
    limit = ConcurrencyLimit.starting(64)
    limit.observe(load(64, 0.9, preemptions=5))
    assert limit.observe(load(50, 0.9, preemptions=5)) == 51


def test_the_limit_is_raised_step_by_step_and_only_if_it_is_what_binds() -> None:
    limit = ConcurrencyLimit(max_slots=64, limit=20)
    assert limit.observe(load(19, LOW_USAGE - 0.1)) == 20
    assert limit.observe(load(20, (LOW_USAGE + HIGH_USAGE) / 2)) == 20
    assert [limit.observe(load(20 + STEP * step, 0.5)) for step in range(12)][-1] == 64


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 400), st.floats(0, 1), st.integers(0, 9)), max_size=60),
)
def test_the_limit_stays_between_one_and_the_slots(max_slots: int, reports: list[tuple[int, float, int]]) -> None:
    limit, preemptions = ConcurrencyLimit.starting(max_slots), 0
    for held, usage, more in reports:
        preemptions += more
        assert 1 <= limit.observe(load(held, usage, preemptions)) <= max_slots


class Short(FakeEngine):
    """Always out of cache."""

    async def load(self) -> EngineLoad:
        return load(10, 0.99)


async def test_the_monitor_applies_the_limit_to_the_pool() -> None:
    pool = EnginePool([Short(EngineId("short")), FakeEngine(EngineId("fine"))], 10)
    await EngineMonitor(pool).poll()
    assert [view.limit for view in pool.views()] == [10, 10], "off unless asked for"
    await EngineMonitor(pool, adapts_concurrency=True).poll()
    assert [view.limit for view in pool.views()] == [8, 10]
