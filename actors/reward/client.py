"""The driver's client of the reward workers: all of them as one `RewardWorker`.

A trajectory is scored by one call of a Ray actor, so a slow reward delays no other. The trajectories of a lost worker
are scored again by another worker or by its replacement process, since an answer costs far more to sample than to
score. Retries are bounded: a trajectory fails after `MAX_LOSSES` workers were lost while scoring it, and a worker is
given up after `RESTARTS_PER_HOUR` (actors/restart_budget.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress

import ray
from ray.actor import ActorHandle

from penstock.actors.ray_errors import first_line, ray_boundary, silence_limit
from penstock.actors.restart_budget import MAX_LOSSES, RESTARTS_PER_HOUR, RestartBudget
from penstock.actors.reward.actor import Result
from penstock.dataflow.errors import PlacementError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.dataflow.trajectory import Task, Trajectory

logger = logging.getLogger(__name__)

SIGN_OF_LIFE_S = 20.0
"""Time between an answer of `is_alive` and the next call, seconds."""
SILENCE_S = 60.0
"""A worker that has not answered `is_alive` for this long is lost; seconds, not counting stalls of the event loop."""


class _WorkerLostError(Exception):
    """The worker was lost while it scored the trajectory."""


class _Worker:
    """One worker and its successive processes.

    Invariant: calls are pending only while it is up. `_lose` fails all of them at once, so that each is repeated on
    another worker; later answers of the lost process are ignored.

    Attributes:
        is_up: Its current process has answered and is not known to be lost.
        given_up: Why it is not restarted any more; None while it is.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], ActorHandle],
        kill: Callable[[ActorHandle], None],
        on_change: Callable[[], None],
    ) -> None:
        """Start its process.

        Args:
            name: For messages.
            start: Starts a process.
            kill: Ends a process.
            on_change: Called when it comes up, and when it is given up.
        """
        self.name = name
        self.actor = start()
        self.is_up = False
        self.given_up: str | None = None
        self._start = start
        self._kill = kill
        self._on_change = on_change
        self._calls: set[asyncio.Future[Result]] = set()
        self._is_lost = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._budget = RestartBudget(RESTARTS_PER_HOUR)
        self._pause_s: float | None = None

    def watch(self) -> None:
        """Supervise its process from now on. Idempotent."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._supervise(), name=f"watch {self.name}")

    async def score(self, label: str, body: bytes) -> Result:
        """Have a trajectory scored.

        Raises:
            _WorkerLostError: With the cause.
        """
        loop, actor = asyncio.get_running_loop(), self.actor
        answer: asyncio.Future[Result] = loop.create_future()

        def settle_in_loop(call: concurrent.futures.Future[Result]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._settle, actor, label, answer, call)

        actor.score.remote(label, body).future().add_done_callback(settle_in_loop)
        self._calls.add(answer)
        try:
            return await answer
        finally:
            self._calls.discard(answer)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _settle(
        self,
        actor: ActorHandle,
        label: str,
        answer: asyncio.Future[Result],
        call: concurrent.futures.Future[Result],
    ) -> None:
        error = call.exception()
        if isinstance(error, ray.exceptions.RayActorError) and actor is self.actor:
            self._lose(first_line(error))
        if answer.done():  # its trajectory was cancelled, or failed by `_lose`
            return
        if error is None:
            answer.set_result(call.result())
        else:
            what = f"{label}: its score cannot be unpickled: {type(error).__name__}: {first_line(error)}"
            answer.set_result(TrajectoryError("reward", what))

    async def _supervise(self) -> None:
        """Watch its process and restart it when it is lost, until the worker is given up."""
        try:
            while self.given_up is None:
                await self._watch_process()
                if self._pause_s is not None:
                    await asyncio.sleep(self._pause_s)
                    self._kill(self.actor)
                    self.actor = self._start()
                    self._is_lost.clear()
        except Exception as error:  # noqa: BLE001  Ray has ended; no call may wait for this worker
            self.given_up = f"{self.name} cannot be restarted: {type(error).__name__}: {first_line(error)}"
            self._fail_calls(self.given_up)

    async def _watch_process(self) -> None:
        """Check that the process is alive, until this check or a call of `score` finds it lost."""
        try:
            while True:
                async with silence_limit(SILENCE_S):
                    await self.actor.is_alive.remote()
                if not self._is_lost.is_set():
                    self.is_up = True
                    self._on_change()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_lost.wait(), SIGN_OF_LIFE_S)
                    return
        except TimeoutError:
            self._lose(f"it did not answer for {SILENCE_S:.0f} s")
        except ray.exceptions.RayError as error:
            self._lose(first_line(error))

    def _lose(self, cause: str) -> None:
        """Fail its calls, and give the worker up if it was lost too often. Only the first call counts."""
        if self._is_lost.is_set():
            return
        self._is_lost.set()
        cause = cause.rstrip(".")
        self._pause_s = self._budget.take(has_served=self.is_up)
        if self._pause_s is None:
            self.given_up = f"{self.name} was lost after {self._budget} and is not restarted; the last cause: {cause}."
        logger.warning(
            "%s with %d trajectories is lost: %s. %s",
            *(self.name, len(self._calls), cause),
            self.given_up or f"It is restarted ({self._budget}), and they are scored again.",
        )
        self._fail_calls(cause)

    def _fail_calls(self, cause: str) -> None:
        """Fail its calls, so that they are repeated on another worker."""
        self.is_up = False
        for answer in self._calls:
            if not answer.done():
                answer.set_exception(_WorkerLostError(cause))
        self._on_change()


class RewardClient:
    """All reward workers as one `RewardWorker`, round-robin."""

    def __init__(
        self, starts: Sequence[Callable[[], ActorHandle]], kill: Callable[[ActorHandle], None] = ray.kill
    ) -> None:
        """Start the workers.

        Args:
            starts: One function per worker that starts its process.
            kill: Ends a process; another one than Ray's for processes that are simulated.
        """
        self._changed = asyncio.Event()
        self._workers = [
            _Worker(f"reward worker {index}", start, kill, self._changed.set) for index, start in enumerate(starts)
        ]
        self._next_worker = itertools.cycle(self._workers)

    async def start(self, timeout_s: float) -> None:
        """Wait until every worker is placed and has loaded the reward.

        Raises:
            PlacementError: If the cluster cannot place one within the time limit, or one does not load.
        """
        try:
            with ray_boundary(PlacementError, "cluster: starting the reward workers"):
                async with silence_limit(timeout_s):
                    await asyncio.gather(*(worker.actor.start.remote() for worker in self._workers))
        except TimeoutError:
            raise PlacementError(
                f"cluster: {len(self._workers)} reward workers were not up within {timeout_s:.0f} s. Ray has "
                f"{ray.available_resources()} free of {ray.cluster_resources()}. Lower reward.num_workers, use "
                "another reward.pool, or raise rollout.start_timeout_s."
            ) from None
        for worker in self._workers:
            worker.is_up = True

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Score one trajectory. The worker's time-out and the limit on losses bound the wait.

        Raises:
            TrajectoryError: kind `reward`.
        """
        label = f"{trajectory.trajectory_id} ({task.task_id})"
        try:
            body = pickle.dumps((task, trajectory), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # user data may raise anything
            raise TrajectoryError("reward", f"{label}: the task cannot be pickled: {error!r}") from error
        losses = 0
        while True:
            worker = await self._available_worker()
            try:
                result = await worker.score(label, body)
            except _WorkerLostError as lost:
                losses += 1
                if losses == MAX_LOSSES:
                    what = f"{losses} reward workers were lost while scoring it; the last cause: {lost}"
                    raise TrajectoryError("reward", f"{label}: {what}") from None
                continue
            if isinstance(result, Score):
                return result
            raise result

    async def close(self, timeout_s: float = 2.0) -> None:
        for worker in self._workers:
            worker.close()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(worker.actor.shutdown.remote() for worker in self._workers))
        except (TimeoutError, ray.exceptions.RayError):
            pass

    async def _available_worker(self) -> _Worker:
        """The next worker that is up; waits while none is up and one is being restarted.

        Raises:
            TrajectoryError: kind `reward`, if all are given up.
        """
        while True:
            for worker in self._workers:
                worker.watch()
            for _ in self._workers:
                worker = next(self._next_worker)
                if worker.is_up:
                    return worker
            if all(worker.given_up for worker in self._workers):
                raise TrajectoryError("reward", f"no reward worker is left. {worker.given_up}")
            self._changed.clear()
            await self._changed.wait()
