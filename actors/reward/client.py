"""The driver's client of the reward workers: all of them as one `RewardWorker`.

Trajectories and results are sent in batches (actors/batched_calls.py). The trajectories of a lost worker are scored
again by another worker or by its replacement process, since an answer costs far more to sample than to score. Retries
are bounded: a trajectory fails after `MAX_LOSSES` workers were lost while scoring it, and a worker is given up after
`RESTARTS_PER_HOUR` (actors/restart_budget.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import ray
from ray.actor import ActorHandle

from penstock.actors import batched_calls
from penstock.actors.batched_calls import Outgoing, collect
from penstock.actors.ray_errors import first_line, ray_boundary, silence_limit
from penstock.actors.restart_budget import MAX_LOSSES, RESTARTS_PER_HOUR, RestartBudget
from penstock.actors.reward.actor import Job, Result
from penstock.dataflow.errors import PlacementError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory

logger = logging.getLogger(__name__)


class _WorkerLostError(Exception):
    """The worker was lost while it scored the trajectory."""


class _Worker:
    """One worker and its successive processes.

    Invariant: scores are awaited only while it is up. `_lose` fails all of them at once, so that each is repeated on
    another worker; later results of the lost process have no number that is still awaited.

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
        self._numbers = itertools.count()
        self._awaited: dict[int, tuple[str, asyncio.Future[Result]]] = {}
        self._outgoing: Outgoing[Job] = Outgoing(self._submit)
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
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        self._awaited[number] = label, loop.create_future()
        self._outgoing.send((number, label, body))
        try:
            return await self._awaited[number][1]
        finally:
            del self._awaited[number]

    def _submit(self, jobs: list[Job]) -> None:
        self.actor.submit.remote(jobs)  # if this fails, so does the poll

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _settle(self, number: int, packed: bytes) -> None:
        """Hand on a result, unless its trajectory was cancelled."""
        label, answer = self._awaited.get(number, ("", None))
        if answer is None or answer.done():
            return
        try:
            answer.set_result(pickle.loads(packed))  # noqa: S301  from our own worker
        except Exception as error:  # noqa: BLE001  user data may raise anything
            what = f"{label}: its score cannot be unpickled: {type(error).__name__}: {first_line(error)}"
            answer.set_result(TrajectoryError("reward", what))

    async def _supervise(self) -> None:
        """Watch its process and restart it when it is lost, until the worker is given up."""
        try:
            while self.given_up is None:
                await self._watch_process()
                self._kill(self.actor)
                if self._pause_s is not None:
                    await asyncio.sleep(self._pause_s)
                    self.actor = self._start()
        except Exception as error:  # noqa: BLE001  Ray has ended; no call may wait for this worker
            self.given_up = f"{self.name} cannot be restarted: {type(error).__name__}: {first_line(error)}"
            self._fail_calls(self.given_up)

    async def _watch_process(self) -> None:
        """Take the results of its process, until that is lost."""
        wait_s: float | None = 0.0  # so that it is known at once whether it is up
        try:
            while True:
                for number, packed in await collect(self.actor.collect.remote, wait_s):
                    self._settle(number, packed)
                if not self.is_up:
                    self.is_up = True
                    self._on_change()
                wait_s = None
        except TimeoutError:
            self._lose(f"it did not answer for {batched_calls.SILENCE_S:.0f} s")
        except ray.exceptions.RayError as error:
            self._lose(first_line(error))

    def _lose(self, cause: str) -> None:
        """Fail its scores, and give the worker up if it was lost too often."""
        cause = cause.rstrip(".")
        self._pause_s = self._budget.take(has_served=self.is_up)
        if self._pause_s is None:
            self.given_up = f"{self.name} was lost after {self._budget} and is not restarted; the last cause: {cause}."
        logger.warning(
            "%s with %d trajectories is lost: %s. %s",
            *(self.name, len(self._awaited), cause),
            self.given_up or f"It is restarted ({self._budget}), and they are scored again.",
        )
        self._fail_calls(cause)

    def _fail_calls(self, cause: str) -> None:
        """Fail its scores, so that they are repeated on another worker."""
        self.is_up = False
        self._outgoing.clear()
        for _, answer in self._awaited.values():
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
            if trajectory.routes is not None:  # rewards do not read them
                trajectory = replace(trajectory, routes=None)
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
