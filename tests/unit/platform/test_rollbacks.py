"""A trainer that loses ranks goes back to its newest checkpoint a bounded number of times within an hour, and engines
that were lost with it are restarted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId
from penstock.platform.cluster import actor_factory
from penstock.platform.cluster.actor_factory import RunActors
from penstock.platform.run import training
from penstock.platform.run.training import MAX_ROLLBACKS_PER_HOUR, RanksLostError, Rollbacks, roll_back
from penstock.platform.simulator.virtual_loop import VirtualTimeLoop


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

    monkeypatch.setattr(training.asyncio, "sleep", sleep)
    return found


async def test_rollbacks_have_growing_pauses_and_end_after_too_many_without_a_new_step(
    pauses: list[float], tmp_path: Path
) -> None:
    actors = Actors()
    parts: Any = SimpleNamespace(actors=actors)
    trajectories = SimpleNamespace(files=SimpleNamespace(drop_after=lambda _version: None))
    instruments: Any = SimpleNamespace(run_dir=tmp_path, note=lambda _text: None, trajectories=trajectories)
    checkpoint: Any = SimpleNamespace(version=3, path=Path("c"))
    lost, rollbacks, config = RanksLostError("planted"), Rollbacks(), object()
    (tmp_path / "evaluations").mkdir()
    answers = [tmp_path / "evaluations" / f"step_{step:06d}.parquet" for step in (3, 4)]
    for file in answers:
        file.touch()
    for _ in range(MAX_ROLLBACKS_PER_HOUR):
        await asyncio.wait_for(roll_back(config, parts, instruments, lost, checkpoint, rollbacks, 7), 5.0)  # type: ignore[arg-type]
    with pytest.raises(RanksLostError, match="planted"):
        await roll_back(config, parts, instruments, lost, checkpoint, rollbacks, 7)  # type: ignore[arg-type]
    assert [file.exists() for file in answers] == [True, False], "the answers of steps that are lost"
    assert actors.num_rollbacks == MAX_ROLLBACKS_PER_HOUR
    assert pauses[0] == 0.0
    assert all(longest / 2 <= pause <= longest for pause, longest in zip(pauses[1:], (1, 2, 4, 8), strict=True))


@pytest.mark.parametrize(
    ("versions", "expected"), [([7] * 20, MAX_ROLLBACKS_PER_HOUR), ([*range(1, 21)], 20), ([9, 8, 7, 8, 9, 9, 9, 9], 5)]
)
def test_rollbacks_of_an_hour_ago_are_forgotten_only_once_the_run_got_further(
    versions: list[int], expected: int
) -> None:
    async def num_rollbacks() -> int:
        rollbacks = Rollbacks()
        for number, version in enumerate(versions):
            if rollbacks.take(version) is None:
                return number
            await asyncio.sleep(1800)  # as long as a step that hangs
        return len(versions)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(num_rollbacks()) == expected


class LostEngine:
    """An engine that was lost with its node."""

    engine_id, node_id = EngineId("engine-1"), "node-b"

    def kill(self) -> None:
        pass

    async def forget_versions(self) -> None:
        raise EngineLostError.final("engine-1: its node is gone")


class LiveEngine(LostEngine):
    engine_id, node_id = EngineId("engine-0"), "node-a"

    async def forget_versions(self) -> None:
        pass


class Trainer:
    nodes = ("node-b",)

    def kill(self) -> None:
        pass


async def test_a_rollback_restarts_the_engines_that_were_lost_too_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes: dict[str, object] = {}

    async def start_trainer(_config: object, **options: Any) -> Trainer:
        nodes["trainer"] = options["near"]
        return Trainer()

    async def start_engine(_actors: object, _config: object, index: int, near: str) -> str:
        nodes[f"engine-{index}"] = near
        return f"new engine-{index}"

    monkeypatch.setattr(actor_factory, "start_trainer_group", start_trainer)
    monkeypatch.setattr(RunActors, "start_engine", start_engine)
    live, before, none = LiveEngine(), Trainer(), cast("Any", None)
    actors = RunActors([live, LostEngine()], before, none, none, None, None)  # type: ignore[arg-type,list-item]
    config: Any = SimpleNamespace(cluster=SimpleNamespace(colocated=False))
    await actors.roll_back(config, "checkpoint")
    assert actors.engines == [live, "new engine-1"]
    assert actors.trainer is not before  # type: ignore[comparison-overlap]
    assert nodes == {"trainer": ("node-b",), "engine-1": "node-b"}
    config.cluster.colocated = True
    actors.engines = [LostEngine()]  # type: ignore[list-item]
    with pytest.raises(EngineLostError, match="its node is gone"):
        await actors.renew_engines(config)
