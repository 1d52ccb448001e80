"""A Ray actor without Ray: remote calls of an object, in virtual time and with Ray's exceptions.

A handle behaves as clients expect of `ray.actor.ActorHandle`: `handle.method.remote(...)` starts the call at once and
returns something to await, calls start in the order in which they were made, and a caller that stops waiting does not
stop the call. What the object raises arrives as `RayTaskError` with its cause. When the process dies, its calls end
with `ActorDiedError`. A result that is passed on to another call is awaited there, as Ray does with an `ObjectRef`.
Arguments and results are not copied, so they must not be changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray


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
        self._loop = asyncio.get_running_loop()

    def call(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Start a call; what it returns is done once the caller has the answer."""
        answer = self._loop.create_future()
        if self.is_alive:
            task = self._loop.create_task(self._run(method, arguments, answer), name=method)
            self._calls[task] = answer
            task.add_done_callback(self._calls.pop)
        else:
            answer.set_exception(ray.exceptions.ActorDiedError())
        return answer

    def die(self) -> None:
        """End the process and its calls."""
        self.is_alive = False
        calls = dict(self._calls)
        for task, answer in calls.items():
            task.cancel()
            if not answer.done():
                answer.set_exception(ray.exceptions.ActorDiedError())
        self._on_death()

    async def _run(self, method: str, arguments: tuple[Any, ...], answer: asyncio.Future[Any]) -> None:
        """Answer a call with what the method returns, or with Ray's error of what it raises."""
        failure: Exception | None = None
        result = None
        try:
            result = await self._call_method(method, arguments)
        except Exception as error:  # noqa: BLE001 - whatever a method raises is sent to the caller
            failed = ray.exceptions.RayTaskError(method, f"{type(error).__name__}: {error}", error, "engine", 1, "node")
            failure = failed.as_instanceof_cause()
        if answer.done():  # nobody waits any more
            return
        if failure is None:
            answer.set_result(result)
        else:
            answer.set_exception(failure)

    async def _call_method(self, method: str, arguments: tuple[Any, ...]) -> Any:
        arguments = tuple([await value if isinstance(value, asyncio.Future) else value for value in arguments])
        return await getattr(self.actor, method)(*arguments)


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
