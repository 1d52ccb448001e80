"""Fakes of the ports for Ray-free tests. They keep the ports' contracts and nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.dataflow.errors import EngineLostError, TrajectoryError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, Score, TokenDelta
from penstock.dataflow.trajectory import GroupPayload, Task, Trajectory
from penstock.dataflow.versions import Span

EOS = 1


@dataclass
class FakeEngine:
    """Answers every prompt with `length` tokens, one per tick, stamped with its current version."""

    engine_id: EngineId = field(default_factory=lambda: EngineId("fake-0"))
    version: int = 0
    length: Callable[[int], int] = lambda _serial: 3
    fail_first: int = 0
    silent: bool = False
    aborted: list[RequestId] = field(default_factory=list)
    served: int = 0
    running: int = 0
    most_running: int = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        serial, self.served = self.served, self.served + 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if serial < self.fail_first:
                raise EngineLostError(f"{self.engine_id}: planted failure {serial}")
            if self.silent:
                await asyncio.sleep(3600)
            count = self.length(serial)
            for position in range(count):
                await asyncio.sleep(0)
                last = position == count - 1
                token = EOS if last else 2 + serial % 10
                yield TokenDelta((token,), (-0.5,), (Span(self.version, 1),), "stop" if last else None)
        finally:
            self.running -= 1

    async def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    async def load(self) -> EngineLoad:
        return EngineLoad(self.version, self.running, 0, 0.0, 0, 0.0)


@dataclass
class FakeRewards:
    """Scores by a function of the trajectory; raises what it returns if that is an error."""

    fn: Callable[[Trajectory], float | TrajectoryError] = lambda trajectory: float(len(trajectory.response) % 2)
    calls: int = 0

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        self.calls += 1
        await asyncio.sleep(0)
        result = self.fn(trajectory)
        if isinstance(result, TrajectoryError):
            raise result
        return Score(result)


class FakeStore:
    """Keeps payloads as their own handles."""

    async def put(self, payload: GroupPayload) -> Any:
        return payload
