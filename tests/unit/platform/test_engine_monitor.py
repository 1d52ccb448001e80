from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.platform.engine_monitor import EngineMonitor
from penstock.rollout.pool import EnginePool
from tests.agents import SayingEngine


class BrokenEngine(SayingEngine):
    async def load(self) -> object:  # type: ignore[override]
        raise ZeroDivisionError("load is broken")


@pytest.mark.asyncio
async def test_polling_that_fails_says_why_and_polling_that_is_ended_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for engine, expected in ((SayingEngine(lambda _: ""), 0), (BrokenEngine(lambda _: ""), 1)):
        with caplog.at_level(logging.ERROR):
            async with EngineMonitor(EnginePool([engine], 2), period_s=0.01).running():
                await asyncio.sleep(0.05)
        assert len(caplog.records) == expected
    assert "polling has failed" in caplog.text
    assert "load is broken" in caplog.text
