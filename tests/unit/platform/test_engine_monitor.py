from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import EngineLoad
from penstock.platform.run.engine_monitor import ANSWER_S, EngineMonitor
from penstock.rollout.engine_pool.pool import EnginePool
from tests.agents import ReplyingEngine
from tests.virtual_time import run_virtual


class BrokenEngine(ReplyingEngine):
    async def load(self) -> object:  # type: ignore[override]
        raise ZeroDivisionError("load is broken")


@pytest.mark.asyncio
async def test_polling_that_fails_reports_the_cause_and_polling_that_is_ended_reports_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for engine, expected in ((ReplyingEngine(lambda _: ""), 0), (BrokenEngine(lambda _: ""), 1)):
        with caplog.at_level(logging.ERROR):
            async with EngineMonitor(EnginePool([engine], 2), period_s=0.01).running():
                await asyncio.sleep(0.05)
        assert len(caplog.records) == expected
    assert "polling has failed" in caplog.text
    assert "load is broken" in caplog.text


class Counting(ReplyingEngine):
    """Reports given numbers; a new one is the engine's next process, with counters at 0."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda _: "", engine_id=EngineId(name))
        self.busy_s, self.num_preemptions = 0.0, 0
        self.answers = True

    async def load(self) -> EngineLoad:
        if not self.answers:
            raise EngineLostError(f"{self.engine_id}: load: no answer within 60 s.")
        return EngineLoad(0, 1, 0, 0.5, int(self.busy_s * 10), self.busy_s, self.num_preemptions)


class Clock:
    """Seconds of the monitor's loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


async def test_idle_share_and_preemptions_stay_right_when_an_engine_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, first, other = Clock(monkeypatch), Counting("a"), Counting("b")
    pool = EnginePool([first, other], 8)
    monitor = EngineMonitor(pool)
    first.busy_s = other.busy_s = 1000.0
    first.num_preemptions = 50
    await monitor.poll()
    clock.now += 10.0
    first.busy_s += 10.0
    other.busy_s += 5.0
    await monitor.poll()
    assert monitor.take_idle_share() == pytest.approx(1 - (10 + 5) / (10 + 10))
    assert monitor.num_preemptions == 50

    pool.fence(EngineId("a"), "it died")
    again = Counting("a")
    pool.add(again)
    clock.now += 10.0
    again.busy_s, again.num_preemptions, other.busy_s = 2.0, 1, other.busy_s + 10.0
    await monitor.poll()
    assert monitor.take_idle_share() == pytest.approx(1 - 10 / 10), "the new process was polled once"
    assert monitor.num_preemptions == 51
    clock.now += 10.0
    again.busy_s, again.num_preemptions, other.busy_s = again.busy_s + 10.0, 3, other.busy_s + 10.0
    await monitor.poll()
    assert monitor.take_idle_share() == pytest.approx(1 - (10 + 10) / 20)
    assert monitor.num_preemptions == 53


async def test_an_engine_that_misses_a_poll_is_counted_for_all_of_the_time_when_it_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, engine, other = Clock(monkeypatch), Counting("a"), Counting("b")
    monitor = EngineMonitor(EnginePool([engine, other], 8))
    await monitor.poll()
    engine.answers = False
    clock.now += 10.0
    engine.busy_s, other.busy_s = 10.0, 10.0
    await monitor.poll()
    assert monitor.take_idle_share() == 0.0
    engine.answers = True
    clock.now += 10.0
    engine.busy_s, other.busy_s = 10.0, 20.0
    await monitor.poll()
    assert monitor.take_idle_share() == pytest.approx(1 - (10 + 10) / (20 + 10))


async def test_the_idle_share_of_a_step_is_that_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, engine = Clock(monkeypatch), Counting("a")
    monitor = EngineMonitor(EnginePool([engine], 8))
    await monitor.poll()
    for second in range(60):  # it samples for 30 s, then waits for the trainer
        clock.now += 1.0
        engine.busy_s += second < 30
        await monitor.poll()
    assert monitor.take_idle_share() == pytest.approx(0.5)
    assert monitor.take_idle_share() == pytest.approx(0.5), "a step shorter than the time between two polls"
    clock.now += 1.0
    engine.busy_s += 1.0
    await monitor.poll()
    assert monitor.take_idle_share() == 0.0


def test_an_engine_that_does_not_answer_keeps_the_others_from_their_next_poll_for_a_few_seconds_only() -> None:
    class Hung(Counting):
        async def load(self) -> EngineLoad:
            await asyncio.sleep(60)
            raise EngineLostError("no answer within 60 s")

    async def poll() -> float:
        await EngineMonitor(EnginePool([Hung("a"), Counting("b")], 8)).poll()
        return asyncio.get_running_loop().time()

    assert run_virtual(poll()) == ANSWER_S
