"""An asyncio event loop whose clock is a number: it jumps to the next timer when nothing is ready.

Everything that waits through asyncio (sleeps, time-outs, events, conditions) runs unchanged, in the same order for
the same input. No file, socket or thread can wake it, so "nothing is ready and no timer is set" is a proof of deadlock.

asyncio itself is deterministic but for one thing: sets of tasks (`TaskGroup` keeps one) iterate in the order of
addresses. Tasks of this loop hash by their serial number instead.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from penstock.dataflow.errors import PenstockError

T = TypeVar("T")
FEWEST_CANCELLED = 1024
"""Cancelled timers are swept once they are more than this and more than half of all."""


class DeadlockError(PenstockError):
    """Nothing is ready and no timer is set: the tasks that are left wait for each other."""


class SerialTask(asyncio.Task[T]):
    """A task whose hash is its serial number, so that a set of tasks has the same order in every run."""

    __slots__ = ("serial",)
    serial: int

    def __hash__(self) -> int:
        return self.serial

    def __eq__(self, other: object) -> bool:
        return self is other


class _Certain(asyncio.Handle):
    """Stands for whatever runs in the next turn."""

    def __init__(self) -> None:
        """Nothing to hold."""

    def cancel(self) -> None:
        raise NotImplementedError("virtual loop: what `call_soon` was given runs for certain. Use `call_later(0, …)`.")

    def cancelled(self) -> bool:
        return False


_CERTAIN = _Certain()


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """`BaseEventLoop` without a selector: callbacks take no time, waiting takes no real time.

    Attributes:
        num_callbacks: Callbacks run so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_callbacks = 0
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._num_cancelled = 0
        self._serials = itertools.count(1)

    get_debug = staticmethod(bool)  # False; a function in C, for asyncio asks for every task and future

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_at(  # type: ignore[override] # the stub's variadic generics say no more here
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Timers of equal time run in the order they were set."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined] # noqa: SLF001 - makes cancel() call back here
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_soon(  # type: ignore[override] # as `call_at`
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """It runs in the next turn, for certain: without a `Handle`, of which every task would need two."""
        if context is None:
            context = contextvars.copy_context()
        self._ready.append((context, callback, args))  # type: ignore[attr-defined]
        return _CERTAIN

    call_soon_threadsafe = call_soon  # type: ignore[assignment] # as `call_at`

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: SerialTask[Any] = SerialTask.__new__(SerialTask)
        task.serial = next(self._serials)  # before the task is complete: asyncio puts it into a set at once
        SerialTask.__init__(task, coro, loop=self, name=name, context=context)  # type: ignore[arg-type] # `Task` makes it text
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What a task came to that nobody waited for: a run that it breaks says so itself."""

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        self._num_cancelled += 1
        if self._num_cancelled > FEWEST_CANCELLED and 2 * self._num_cancelled > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._num_cancelled = 0

    def _run_once(self) -> None:
        """One turn: what is due becomes ready, and all that is ready now runs."""
        ready = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        while timers and (timers[0][2].cancelled() or timers[0][0] <= self._now or not ready):
            when, _, handle = heapq.heappop(timers)
            if handle.cancelled():
                self._num_cancelled -= 1
                continue
            handle._scheduled = False  # type: ignore[attr-defined] # noqa: SLF001
            self._now = max(self._now, when)
            ready.append((handle._context, self._fire, (handle,)))  # type: ignore[attr-defined] # noqa: SLF001
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            raise DeadlockError(self._deadlock())
        self.num_callbacks += len(ready)
        for _ in range(len(ready)):  # an error in a callback ends the loop: nobody else would see it
            context, callback, args = ready.popleft()
            if not args:  # a step of a task
                context.run(callback)
            elif len(args) == 1:  # what wakes one
                context.run(callback, args[0])
            else:
                context.run(callback, *args)

    def _fire(self, handle: asyncio.TimerHandle) -> None:
        """Run a timer, unless it was cancelled after it had become ready."""
        if not handle._cancelled:  # noqa: SLF001
            handle._callback(*handle._args)  # type: ignore[attr-defined] # noqa: SLF001

    def _deadlock(self) -> str:
        waiting = sorted(asyncio.all_tasks(self), key=hash)
        listed = ", ".join(task.get_name() for task in waiting[:8])
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        return (
            f"simulation: deadlock at t={self._now:.3f} s: nothing is ready and no timer is set, "
            f"{len(waiting)} tasks wait: {listed}{more}"
        )

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: no selector."""

    def _write_to_self(self) -> None:
        """Nothing to wake: the loop never blocks."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in a new virtual-time loop and return its result.

    Raises:
        DeadlockError: If it can never end.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


__all__ = ["DeadlockError", "VirtualTimeLoop", "run_virtual"]
