"""Fakes of the ports for Ray-free tests. They keep the ports' contracts and nothing more."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.dataflow.errors import EngineLostError, TrajectoryError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, Score, TokenDelta
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import Span

EOS = 1


def next_token(context: Sequence[int]) -> int:
    """The fake policy: any token but padding and EOS, a function of everything before it."""
    return 2 + zlib.crc32(bytes(token % 256 for token in context)) % 28


def ends_by_context(context: Sequence[int]) -> bool:
    """A stop rule that knows the context only: about one token in 24 is followed by EOS."""
    return zlib.crc32(bytes(token % 256 for token in context), 1) % 24 == 0


@dataclass
class FakeEngine:
    """Greedy over `next_token`, one token per tick, stamped with its current version; then EOS.

    Attributes:
        length: Tokens of an answer, by its serial number on this engine.
        ends: Decides by the context instead, so that a resumed answer ends where the uninterrupted one does.
        loses_at: The request with this serial number is lost after so many tokens; None is never.
        fail_first: So many requests are lost before their first token.
        dies: What it loses it loses because its process ends.
        silent: Accepts requests and says nothing.
        is_asleep: Stops in the middle while True.
    """

    engine_id: EngineId = field(default_factory=lambda: EngineId("fake-0"))
    version: int = 0
    length: Callable[[int], int] = lambda _serial: 3
    ends: Callable[[Sequence[int]], bool] | None = None
    loses_at: Callable[[int], int | None] = lambda _serial: None
    fail_first: int = 0
    dies: bool = False
    silent: bool = False
    is_asleep: bool = False
    aborted: list[RequestId] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    served: int = 0
    running: int = 0
    most_running: int = 0
    _ending: set[RequestId] = field(default_factory=set)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        serial, self.served = self.served, self.served + 1
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if serial < self.fail_first:
                raise self._loss(f"planted failure {serial}")
            context, num_sampled, reason = list(request.prompt_token_ids), 0, None
            while reason is None:
                await asyncio.sleep(3600 if self.silent or self.is_asleep else 0)
                if request.request_id in self._ending:
                    yield TokenDelta((), (), (), "abort")
                    return
                if num_sampled == self.loses_at(serial):
                    raise self._loss(f"planted loss of {serial}")
                num_sampled += 1
                is_last = self.ends(context) if self.ends else num_sampled >= self.length(serial)
                context.append(EOS if is_last else next_token(context))
                reason = "stop" if is_last else "length" if num_sampled >= request.sampling.max_new_tokens else None
                yield TokenDelta((context[-1],), (-1.0 / context[-1],), (Span(self.version, 1),), reason)
        finally:
            self.running -= 1
            self._ending.discard(request.request_id)

    def _loss(self, what: str) -> EngineLostError:
        lost = EngineLostError.final if self.dies else EngineLostError
        return lost(f"{self.engine_id}: {what}")

    async def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        self._ending.add(request_id)

    async def load(self) -> EngineLoad:
        return EngineLoad(self.version, self.running, 0, 0.0, 0, 0.0)


@dataclass
class FakeRewards:
    """Scores by a function of the trajectory, None is no opinion; raises what it returns if that is an error."""

    fn: Callable[[Trajectory], float | TrajectoryError | None] = lambda trajectory: float(len(trajectory.response) % 2)
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

    async def get(self, handle: GroupPayload) -> GroupPayload:
        return handle
