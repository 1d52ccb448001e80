"""A Ray actor without Ray: remote calls of an object, in virtual time and with Ray's exceptions.

A handle behaves as clients expect of `ray.actor.ActorHandle`: `handle.method.remote(...)` starts the call at once and
returns something to await, calls start in the order in which they were made, and a caller that stops waiting does not
stop the call. What the object raises arrives as `RayTaskError` with its cause. When the process dies, its calls end
with the error that Ray would give, after the time that Ray takes to notice; later calls get `ActorDiedError`. A result
that is passed on to another call is awaited there, as Ray does with an `ObjectRef`. Arguments and results are not
copied, so they must not be changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from penstock.platform.simulator.world import InvariantError, stop_run


class VirtualProcess:
    """The process of one actor.

    Attributes:
        actor: The object whose methods are called.
        handle: What a client holds.
        is_alive: Whether the process has not died.
    """

    def __init__(self, actor: object, on_death: Callable[[], None]) -> None:
        """Start a process.

        Args:
            actor: The object.
            on_death: Ends whatever the object has started by itself.
        """
        self.actor = actor
        self.handle = VirtualHandle(self)
        self.is_alive = True
        self._on_death = on_death
        self._calls: dict[asyncio.Task[None], asyncio.Future[Any]] = {}
        self._unnoticed: list[asyncio.Future[Any]] = []
        self._is_death_known = False
        self._responds = asyncio.Event()
        self._responds.set()
        self._loop = asyncio.get_running_loop()

    @property
    def responds(self) -> bool:
        """Whether it is alive and not hanging."""
        return self.is_alive and self._responds.is_set()

    def call(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Start a call; what it returns is done once the caller has the answer."""
        answer = self._loop.create_future()
        if self.is_alive:
            task = self._loop.create_task(self._run(method, arguments, answer), name=method)
            self._calls[task] = answer
            task.add_done_callback(self._calls.pop)
        elif self._is_death_known:
            answer.set_exception(ray.exceptions.ActorDiedError())
        else:
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

    async def _run(self, method: str, arguments: tuple[Any, ...], answer: asyncio.Future[Any]) -> None:
        failure: Exception | None = None
        result = None
        if not self._responds.is_set():
            await self._responds.wait()
        try:
            arguments = tuple([await value if isinstance(value, asyncio.Future) else value for value in arguments])
            result = await getattr(self.actor, method)(*arguments)
        except InvariantError as error:  # a finding, which no client may take for an error of the engine
            stop_run(error)
            return
        except Exception as error:  # noqa: BLE001 - whatever a method raises is sent to the caller
            failed = ray.exceptions.RayTaskError(method, f"{type(error).__name__}: {error}", error, "engine", 1, "node")
            failure = failed.as_instanceof_cause()
        if not self._responds.is_set():
            await self._responds.wait()
        if answer.done():  # nobody waits any more
            return
        if failure is None:
            answer.set_result(result)
        else:
            answer.set_exception(failure)


class VirtualHandle:
    """Stands for `ray.actor.ActorHandle`."""

    def __init__(self, process: VirtualProcess) -> None:
        self.process = process

    def __getattr__(self, method: str) -> RemoteMethod:
        remote = self.__dict__[method] = RemoteMethod(self.process, method)
        return remote


class RemoteMethod:
    """A method of an actor, called with `remote`."""

    __slots__ = ("_method", "_process")

    def __init__(self, process: VirtualProcess, method: str) -> None:
        self._process = process
        self._method = method

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return self._process.call(self._method, arguments)
