"""Time-shared devices: the order of starts, who sleeps during a step, and engines that fail to sleep or wake up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.dataflow.errors import EngineLostError, TrainingError
from penstock.dataflow.ids import EngineId
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster import actor_factory
from penstock.platform.cluster.actor_factory import RunActors, start_actors
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.build import policy_runtime
from penstock.platform.run.colocation import engines_asleep
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.flows import CODEC


@dataclass
class Sleepy:
    """An engine that sleeps and wakes, or is lost in the attempt."""

    name: str
    calls: list[str]
    lost_at: str = ""
    version: int = 0
    engine_id: EngineId = field(init=False)

    def __post_init__(self) -> None:
        self.engine_id = EngineId(self.name)

    async def sleep(self) -> None:
        await self._switch("sleep")

    async def wake(self) -> None:
        await self._switch("wake")

    async def _switch(self, what: str) -> None:
        if self.lost_at == what:
            raise EngineLostError.final(f"{self.name}: {what}: no answer within 300 s.")
        self.calls.append(f"{self.name} {what}")


async def step(pool: EnginePool, calls: list[str], frozen: Sequence[Frozen] = (), *, is_lost: bool = False) -> None:
    """A step of the trainer in its turn."""
    async with engines_asleep(pool, frozen):  # type: ignore[arg-type]
        calls.append("step")
        if is_lost:
            raise TrainingError("trainer: step: a process died")


async def turn_of(pool: EnginePool, calls: list[str]) -> list[str]:
    """What happened in one step."""
    calls.clear()
    await asyncio.wait_for(step(pool, calls), 5.0)
    return calls


async def test_a_fenced_engine_is_left_alone_and_one_that_joined_takes_its_turn() -> None:
    calls: list[str] = []
    pool = EnginePool([Sleepy("a", calls), Sleepy("b", calls, lost_at="sleep")], 4)  # type: ignore[list-item]
    pool.fence(EngineId("b"), "it died")
    pool.add(Sleepy("c", calls))  # type: ignore[arg-type]
    assert await turn_of(pool, calls) == ["a sleep", "c sleep", "step", "a wake", "c wake"]


async def test_an_engine_that_does_not_go_to_sleep_or_wake_up_is_fenced_off_and_the_step_is_taken() -> None:
    calls: list[str] = []
    engines = [Sleepy("a", calls), Sleepy("b", calls, lost_at="sleep"), Sleepy("c", calls, lost_at="wake")]
    pool = EnginePool(engines, 4)  # type: ignore[arg-type]
    assert await turn_of(pool, calls) == ["a sleep", "c sleep", "step", "a wake"]
    assert {name: "no answer" in why for name, why in pool.fenced.items()} == {"b": True, "c": True}


async def test_the_step_waits_for_work_that_is_in_use_of_the_engines_though_no_request_runs() -> None:
    calls: list[str] = []
    pool = EnginePool([Sleepy("a", calls)], 4)  # type: ignore[list-item]
    with pool.in_use():
        async with pool.lease():
            pass
        turn = asyncio.create_task(turn_of(pool, calls))
        await asyncio.sleep(0.01)
        assert calls == [], "the lease has ended, the work has not"
    assert await turn == ["a sleep", "step", "a wake"]


class Frozen:
    """A reference that shares the GPU."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        self.calls.append("reference rests")
        try:
            yield
        finally:
            self.calls.append("reference may compute")


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_reference_on_the_same_gpu_rests_while_the_trainer_steps(is_lost: bool) -> None:
    calls: list[str] = []
    pool = EnginePool([Sleepy("a", calls)], 4)  # type: ignore[list-item]
    with pytest.raises(TrainingError) if is_lost else nullcontext():
        await step(pool, calls, [Frozen(calls)], is_lost=is_lost)
    turns = ["a sleep", "reference rests", "step", "reference may compute"]
    assert calls == (turns if is_lost else [*turns, "a wake"])


async def test_after_a_step_that_failed_the_engines_stay_asleep_since_a_rank_may_hold_the_memory() -> None:
    calls: list[str] = []
    pool = EnginePool([Sleepy("a", calls)], 4)  # type: ignore[list-item]
    with pytest.raises(TrainingError, match="a process died"):
        await step(pool, calls, is_lost=True)
    assert calls == ["a sleep", "step"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster.colocated=true", "dataflow.max_staleness=0"], "and not if they take turns with the trainer"),
        (["rollout.max_engine_restarts_per_hour=0"], "at most rollout.max_engine_restarts_per_hour=0 times"),
    ],
    ids=["colocated", "apart"],
)
async def test_the_last_engine_that_is_lost_says_why_it_is_not_restarted(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing() -> None: ...

    async def publisher(*_arguments: object) -> SimpleNamespace:
        return SimpleNamespace(catch_up=nothing, close=nothing)

    config = compose_config(["experiment=arithmetic", *words])
    pool, none = EnginePool([Sleepy("a", [])], 4), cast("Any", None)  # type: ignore[list-item]
    actors = RunActors([], cast("Any", SimpleNamespace()), none, none, None, None)
    monkeypatch.setattr(RunActors, "publisher", publisher)
    async with policy_runtime(config, actors, TrajectoryRunner(pool, CODEC, 5.0), [], none):
        pool.fence(EngineId("a"), "planted")
        assert told in pool.no_engine_left()


async def test_going_back_to_a_checkpoint_loads_the_trainer_while_the_engines_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    async def restart(*_arguments: object) -> None:
        calls.append("load")

    async def renew(*_arguments: object) -> None:
        calls.append("forget")

    monkeypatch.setattr(RunActors, "_restart_trainer", restart)
    monkeypatch.setattr(RunActors, "renew_engines", renew)
    none = cast("Any", None)
    actors = RunActors([Sleepy("a", calls), Sleepy("b", calls)], none, none, none, None, None)  # type: ignore[list-item]
    await actors.roll_back(SimpleNamespace(cluster=SimpleNamespace(colocated=True)), "checkpoint")  # type: ignore[arg-type]
    assert calls == ["a sleep", "b sleep", "load", "a wake", "b wake", "forget"]


@pytest.mark.parametrize(
    ("colocated", "expected"),
    [
        (True, ["trainer loads", "trainer is up", "engines load"]),
        (False, ["trainer loads", "engines load", "trainer is up"]),
    ],
)
async def test_a_colocated_engine_starts_when_the_trainer_has_loaded(
    colocated: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    async def trainer(*_arguments: object, **_options: object) -> None:
        calls.append("trainer loads")
        await asyncio.sleep(0.01)
        calls.append("trainer is up")

    async def engines(*_arguments: object) -> list[object]:
        calls.append("engines load")
        return []

    async def nothing(*_arguments: object) -> None: ...

    @asynccontextmanager
    async def session(config: RunConfig, *_arguments: object) -> AsyncIterator[RunConfig]:
        yield config

    overrides = ["cluster.colocated=true", "dataflow.max_staleness=0"] if colocated else []
    config = compose_config(["experiment=arithmetic", *overrides])
    closed = SimpleNamespace(close=nothing)
    for name, fake in {
        "cluster_session": session,
        "start_trainer_group": trainer,
        "start_engines": engines,
        "reward_workers": lambda _config, **_options: closed,
        "start_frozen_group": nothing,
    }.items():
        monkeypatch.setattr(actor_factory, name, fake)
    monkeypatch.setattr(RunActors, "of_policies", lambda _actors: [])
    async with start_actors(config):
        assert calls == expected
