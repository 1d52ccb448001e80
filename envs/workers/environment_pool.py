"""The environments of one kind, over the episodes that they play: opened ahead, reused, limited in number.

A kind is a task source: `env.factory`, a stream or an evaluation set. `environment()` takes no task, so every
environment of a kind can play each of its tasks. States of one environment (`reset` is the first call of an episode):

    opening ─▶ idle ─▶ playing ─▶ idle       it is reusable, and its episode ended without an error
       │        │         └─────▶ closing ─▶ closed       otherwise
       └────────┴───────────────▶ closing ─▶ closed       it cannot be opened, its process is lost, the run ends

Invariant: an environment plays one episode at a time, and another one only if it says that its `reset` removes what an
episode leaves (`Playable.reusable`). At most `max_open` are in a state before `closed`. Each that was opened is closed,
or ends with its process; one that does not close counts until then.

Consumes: requests for an environment, and environments that come back. Waits for: an episode waits for the first
environment that becomes idle, in the order of the requests; an opening waits for a place below `max_open`. Unblocked
by: an opening, the end of another episode, a close; or the time limit, if nothing opens or becomes idle for so long. An
episode holds one environment only, and no environment waits for an episode: there is no circle of waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from penstock.dataflow.errors import TrajectoryError
from penstock.envs.config import EpisodeConfig


@dataclass(frozen=True, slots=True)
class Usage:
    """What environments did since the run began; absolute."""

    opened: int = 0
    """Environments that were opened."""
    closed: int = 0
    """Those of them that are closed, or ended with their process."""
    episodes: int = 0
    """Episodes that got an environment."""
    reused: int = 0
    """Those of them whose environment had played before."""
    waited_s: float = 0.0
    """Seconds that they waited for it, summed over episodes."""
    open_s: float = 0.0
    """Seconds that environments were idle or playing, summed over environments."""
    busy_s: float = 0.0
    """Seconds of them in which a call of the environment ran."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def metrics_since(self, before: Usage) -> dict[str, float]:
        """The metrics of the time since `before`; none in a run that has opened no environment."""
        if not self.opened:
            return {}
        episodes, open_s = self.episodes - before.episodes, self.open_s - before.open_s
        busy_s, waited_s = self.busy_s - before.busy_s, self.waited_s - before.waited_s
        return {
            "env/opened": self.opened,
            "env/closed": self.closed,
            "env/reused": self.reused,
            **({"env/wait_s": waited_s / episodes} if episodes else {}),
            **({"env/utilisation": min(max(busy_s / open_s, 0.0), 1.0)} if open_s > 0 else {}),
        }


class Seconds:
    """The time that things are in a state, summed over the things."""

    def __init__(self) -> None:
        self._num = 0
        self._total_s = 0.0
        self._since = time.monotonic()

    def read(self) -> float:
        """Seconds so far."""
        now = time.monotonic()
        self._total_s += self._num * (now - self._since)
        self._since = now
        return self._total_s

    def change(self, difference: int) -> None:
        """So many more, or fewer, are in the state from now on."""
        self.read()
        self._num += difference

    @contextmanager
    def one(self) -> Iterator[None]:
        """One more is in the state."""
        self.change(1)
        try:
            yield
        finally:
            self.change(-1)


class UsageMeter:
    """Measures `Usage`, whose attributes these are."""

    def __init__(self) -> None:
        self.opened = self.closed = self.episodes = self.reused = 0
        self.waited_s = 0.0
        self.open, self.busy = Seconds(), Seconds()

    def read(self) -> Usage:
        return Usage(
            self.opened, self.closed, self.episodes, self.reused, self.waited_s, self.open.read(), self.busy.read()
        )


State = Literal["opening", "idle", "playing", "closing"]


class Poolable(Protocol):
    """What a pool knows of an environment.

    Attributes:
        is_reusable: Whether it may play several episodes; known once it is open.
        num_episodes: Episodes for which it was taken.
        is_usable: Whether its process runs, and takes further episodes.
    """

    is_reusable: bool
    num_episodes: int

    @property
    def is_usable(self) -> bool: ...


_Environment = TypeVar("_Environment", bound=Poolable)


class EnvironmentPool(Generic[_Environment]):
    """Opens, lends and closes environments of one kind. Use it from one event loop, and close it.

    Attributes:
        num: State -> environments in it; those that are closed are forgotten.

    Args:
        limits: `warm`, `max_open` and `wait_timeout_s` of the kind.
        meter: Where the use of its environments is measured.
        new: Makes an environment that is not open yet.
        open_one: Opens it. If that raises, the first episode that waits fails with the error.
        close_one: Closes it, and returns when it holds no resources any more. Must not raise.
    """

    def __init__(
        self,
        limits: EpisodeConfig,
        meter: UsageMeter,
        new: Callable[[], _Environment],
        open_one: Callable[[_Environment], Awaitable[None]],
        close_one: Callable[[_Environment], Awaitable[None]],
    ) -> None:
        self.num: Counter[State] = Counter()
        self._limits = limits
        self._meter = meter
        self._new = new
        self._open_one = open_one
        self._close_one = close_one
        self._idle: deque[_Environment] = deque()
        self._waiting: deque[asyncio.Future[_Environment]] = deque()
        self._openings: set[asyncio.Task[None]] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self._progress_at = 0.0  # when one was lent, or its opening ended
        self._may_open_ahead = True  # after a failure only once an episode asks again, so that failures do not repeat
        self._is_closed = False

    async def take(self) -> _Environment:
        """Wait for an environment, which plays one episode and is then given back.

        Raises:
            TrajectoryError: kind `env`, if it cannot be opened, or none becomes idle for `wait_timeout_s`.
            ConfigError: As `open_one` raises it.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[_Environment] = loop.create_future()
        began_at, self._may_open_ahead = loop.time(), True
        self._waiting.append(waiter)
        self._serve()
        try:
            while not waiter.done():
                left_s = max(began_at, self._progress_at) + self._limits.wait_timeout_s - loop.time()
                if left_s > 0:
                    await asyncio.wait([waiter], timeout=left_s)
                elif self._openings:  # which have a limit of their own
                    awaited: list[asyncio.Future[Any]] = [waiter, *self._openings]
                    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                else:
                    waiter.set_exception(TrajectoryError("env", self._why_none()))
            environment = waiter.result()
        except BaseException:
            self._withdraw(waiter)
            raise
        self._meter.waited_s += loop.time() - began_at
        self._meter.episodes += 1
        self._meter.reused += environment.num_episodes > 0
        environment.num_episodes += 1
        return environment

    def give_back(self, environment: _Environment, *, is_sound: bool) -> None:
        """Take an environment back after its episode.

        Args:
            environment: The environment.
            is_sound: Whether the episode ended without an error, and no call is running.
        """
        if is_sound and environment.is_reusable and environment.is_usable:
            self._keep(environment, "playing")
        else:
            self._close(environment, "playing")

    def close_unusable(self) -> None:
        """Close the idle environments whose process has been lost, or takes no further episodes."""
        for environment in [one for one in self._idle if self._is_closed or not one.is_usable]:
            self._may_open_ahead = False
            self._idle.remove(environment)
            self._close(environment, "idle")

    async def close(self, timeout_s: float) -> None:
        """Close what is idle or opens, and wait until all that is not playing is closed, at most `timeout_s`.

        Call it again when the processes have ended, which ends every close.
        """
        self._is_closed = True
        self.close_unusable()
        while self._waiting:
            self._waiting.popleft().set_exception(TrajectoryError("env", "the environments are being closed"))
        for opening in self._openings:
            opening.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while tasks := self._openings | self._closings:
                    await asyncio.wait(tasks)

    def _serve(self) -> None:
        """Lend idle environments to the episodes that wait, and open what is missing."""
        while self._waiting and self._idle:
            self._progress_at = asyncio.get_running_loop().time()
            self._move("idle", "playing")
            self._waiting.popleft().set_result(self._idle.popleft())
        if self._is_closed:
            return
        ahead = self._limits.warm if self._may_open_ahead else 0
        missing = len(self._waiting) + ahead - self.num["idle"] - self.num["opening"]
        if self._limits.max_open is not None:
            missing = min(missing, self._limits.max_open - self.num.total())
        for _ in range(missing):
            self._move(None, "opening")
            _start(self._open(self._new()), self._openings)

    async def _open(self, environment: _Environment) -> None:
        try:
            await self._open_one(environment)
        except BaseException as error:
            self._may_open_ahead = False
            self._close(environment, "opening")
            if not isinstance(error, Exception):  # the pool is being closed
                raise
            self._progress_at = asyncio.get_running_loop().time()
            if self._waiting:
                self._waiting.popleft().set_exception(error)
        else:
            self._meter.opened += 1
            self._meter.open.change(1)
            self._keep(environment, "opening")

    def _keep(self, environment: _Environment, before: State) -> None:
        """Make it idle, unless no episode waits for it and it was not to be opened ahead either."""
        is_kept = environment.is_usable and (environment.is_reusable or self.num["idle"] < self._limits.warm)
        if self._is_closed or not (self._waiting or is_kept):
            self._close(environment, before)
            return
        self._move(before, "idle")
        self._idle.append(environment)
        self._serve()

    def _close(self, environment: _Environment, before: State) -> None:
        was_open = before != "opening"
        self._move(before, "closing")
        self._meter.open.change(-was_open)
        _start(self._end(environment, was_open=was_open), self._closings)

    async def _end(self, environment: _Environment, *, was_open: bool) -> None:
        await self._close_one(environment)
        self._meter.closed += was_open
        self._move("closing", None)
        self._serve()

    def _withdraw(self, waiter: asyncio.Future[_Environment]) -> None:
        """An episode does not wait any more; the environment that it was just lent is idle again."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif waiter.exception() is None:
            self._keep(waiter.result(), "playing")

    def _move(self, before: State | None, after: State | None) -> None:
        if before is not None:
            self.num[before] -= 1
        if after is not None:
            self.num[after] += 1

    def _why_none(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in self.num.items() if count)
        return (
            f"no environment became free within {self._limits.wait_timeout_s:g} s (env.episode.wait_timeout_s), while "
            f"{len(self._waiting)} episodes waited for one; open: {states or 'none'} of at most "
            f"max_open={self._limits.max_open}. Either the episodes that have one hang, or they are longer than that: "
            "raise max_open, or wait_timeout_s, or run fewer episodes at a time"
        )


def _start(job: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(job)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
