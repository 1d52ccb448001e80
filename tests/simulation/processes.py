"""Virtual processes with faults: they hang, and their death is noticed later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from penstock.platform.simulator.virtual_actor import VirtualProcess
from tests.simulation.world import InvariantError, stop_run


class FaultyProcess(VirtualProcess):
    """A process that can hang. When it dies, its calls end with the error that Ray would give, once Ray has noticed."""

    def __init__(self, actor: object, on_death: Callable[[], None]) -> None:
        super().__init__(actor, on_death)
        self._unnoticed: list[asyncio.Future[Any]] = []
        self._is_death_known = False
        self._responds = asyncio.Event()
        self._responds.set()

    @property
    def responds(self) -> bool:
        """Whether it is alive and not hanging."""
        return self.is_alive and self._responds.is_set()

    def call(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        if self.is_alive or self._is_death_known:
            return super().call(method, arguments)
        answer = self._loop.create_future()
        self._unnoticed.append(answer)
        return answer

    def die(self, error: ray.exceptions.RayError | None = None, noticed_after_s: float = 0.0) -> None:
        """End the process.

        Args:
            error: What its calls get; None is Ray's error for a dead actor.
            noticed_after_s: Until then, calls are not answered at all.
        """
        if not self.is_alive:
            self._notice(ray.exceptions.ActorDiedError())  # who kills a dead process knows that it is dead
            return
        self.is_alive = False
        self._responds.set()
        self._unnoticed = list(self._calls.values())
        for task in list(self._calls):
            task.cancel()
        self._on_death()
        if noticed_after_s:
            self._loop.call_later(noticed_after_s, self._notice, error or ray.exceptions.ActorDiedError())
        else:
            self._notice(error or ray.exceptions.ActorDiedError())

    def hang(self) -> None:
        """Start no call and send no answer until `recover`."""
        self._responds.clear()

    def recover(self) -> None:
        """Continue after a hang."""
        self._responds.set()

    def _notice(self, error: ray.exceptions.RayError) -> None:
        self._is_death_known = True
        unnoticed, self._unnoticed = self._unnoticed, []
        for answer in unnoticed:
            if not answer.done():
                answer.set_exception(error)

    async def _call_method(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if not self._responds.is_set():
            await self._responds.wait()
        try:
            return await super()._call_method(method, arguments)
        except InvariantError as error:  # a finding, which no client may take for an error of the engine
            stop_run(error)
            return await asyncio.Event().wait()
        finally:
            if not self._responds.is_set():
                await self._responds.wait()
