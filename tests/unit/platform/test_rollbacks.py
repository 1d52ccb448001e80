"""A trainer that loses ranks goes back to its newest checkpoint a bounded number of times within an hour."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.actors.restart_budget import RestartBudget
from penstock.platform.run import launch
from penstock.platform.run.launch import MAX_ROLLBACKS_PER_HOUR, RanksLostError, roll_back


class Actors:
    """Counts the rollbacks."""

    def __init__(self) -> None:
        self.num_rollbacks = 0

    async def roll_back(self, config: object, restore_from: str) -> None:
        self.num_rollbacks += 1


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses before the rollbacks, seconds; none is waited for."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(launch.asyncio, "sleep", sleep)
    return found


async def test_rollbacks_have_growing_pauses_and_end_after_too_many_in_an_hour(pauses: list[float]) -> None:
    actors = Actors()
    parts: Any = SimpleNamespace(actors=actors)
    trajectories = SimpleNamespace(drop_after=lambda _version: None)
    instruments: Any = SimpleNamespace(run_dir=Path(), note=lambda _text: None, trajectories=trajectories)
    checkpoint: Any = SimpleNamespace(version=3, path=Path("c"))
    lost, budget, config = RanksLostError("planted"), RestartBudget(MAX_ROLLBACKS_PER_HOUR), object()
    for _ in range(MAX_ROLLBACKS_PER_HOUR):
        await asyncio.wait_for(roll_back(config, parts, instruments, lost, checkpoint, budget), 5.0)  # type: ignore[arg-type]
    with pytest.raises(RanksLostError, match="planted"):
        await roll_back(config, parts, instruments, lost, checkpoint, budget)  # type: ignore[arg-type]
    assert actors.num_rollbacks == MAX_ROLLBACKS_PER_HOUR
    assert pauses[0] == 0.0
    assert all(longest / 2 <= pause <= longest for pause, longest in zip(pauses[1:], (1, 2, 4, 8), strict=True))
