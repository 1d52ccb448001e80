"""An asyncio event loop in virtual time, whose clock jumps to the next timer when no callback is ready.

Code that waits through asyncio (sleeps, timeouts, events, conditions) runs unchanged and in a reproducible order. No
file, socket or thread can wake the loop, so if nothing is ready and no timer is set, there is a deadlock.

The loop differs from asyncio's own by its selector, and by two changes that make the order reproducible: tasks hash by
their serial number, because sets of tasks (as in `TaskGroup`) would iterate in the order of addresses, and timers of
equal time run in the order in which they were set.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.dataflow.errors import PenstockError

T = TypeVar("T")


class DeadlockError(PenstockError):
    """Nothing is ready and no timer is set: the remaining tasks wait for each other."""


class SerialTask(asyncio.Task[T]):
    """A task whose hash is its serial number, so that a set of tasks has the same order in every run."""

    __slots__ = ("serial",)
    serial: int

    def __hash__(self) -> int:
        return self.serial

    def __eq__(self, other: object) -> bool:
        return self is other


class SerialTimer(asyncio.TimerHandle):
    """A timer that runs before timers of the same time that were set later."""

    __slots__ = ("serial",)
    serial: int
    _when: float

    def __lt__(self, other: SerialTimer) -> bool:  # type: ignore[override] # all timers of the loop have this type
        # Called for every step in the heap: as one comparison of tuples it took twice as long.
        if self._when != other._when:
            return self._when < other._when
        return self.serial < other.serial


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """`BaseEventLoop` whose selector waits for nothing: callbacks take no time, waiting takes no real time.

    Attributes:
        num_turns: Number of iterations of the loop so far. Each runs all ready callbacks.
        has_failed: Set once the run has failed: while it is closed, errors in callbacks are consequences of that.
    """

    _scheduled: list[SerialTimer]

    def __init__(self) -> None:
        super().__init__()
        self.num_turns = 0
        self.has_failed = False
        self._now = 0.0
        self._serials = itertools.count(1)
        self._selector = self  # asyncio calls it once per iteration
        self._clock_resolution = 0.0

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._now

    def stall(self, seconds: float) -> None:
        """Stand still, as a driver whose process is stopped. What was due meanwhile runs afterwards, in its order."""
        self._now += seconds

    def select(self, timeout: float | None) -> tuple[()]:
        """Jump to the next timer, if nothing is ready.

        Args:
            timeout: Seconds to the next timer; 0 if something is ready, None if there is no timer.

        Raises:
            DeadlockError: If nothing is ready and there is no timer.
        """
        self.num_turns += 1
        if timeout is None:
            raise DeadlockError(self._deadlock())
        if timeout > 0:
            self._now = self._scheduled[0].when()
        self._clock_resolution = math.ulp(self._now)  # a timer is due exactly at its time
        return ()

    def call_at(  # type: ignore[override] # the stub's variadic generics say no more here
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Timers of equal time run in the order they were set."""
        timer = SerialTimer(when, callback, args, self, context)
        timer.serial = next(self._serials)
        timer._scheduled = True  # type: ignore[attr-defined] # noqa: SLF001 - counted if it is cancelled
        heapq.heappush(self._scheduled, timer)
        return timer

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: SerialTask[Any] = SerialTask.__new__(SerialTask)
        task.serial = next(self._serials)  # before the task is complete: asyncio puts it into a set at once
        SerialTask.__init__(task, coro, loop=self, name=name, context=context)  # type: ignore[arg-type] # `Task` makes it text
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run on an error in a callback. Errors of tasks that are never awaited are reported by the run."""
        if "handle" in context and not self.has_failed:
            raise context["exception"]

    def _deadlock(self) -> str:
        waiting = sorted(asyncio.all_tasks(self), key=hash)
        listed = ", ".join(task.get_name() for task in waiting[:8])
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        return (
            f"simulation: deadlock at t={self._now:.3f} s: nothing is ready and no timer is set, "
            f"{len(waiting)} tasks wait: {listed}{more}"
        )

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing, because there are no events."""

    def _write_to_self(self) -> None:
        """Do nothing, because the loop never blocks."""
