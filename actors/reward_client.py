"""The driver's side of the reward workers: all of them as one `RewardWorker`.

Ray places the workers and says how they died. Jobs and scores travel over a connection to each (direct.py), which is
made when the first job comes: until then the worker need not have its place.

A worker that is lost gives its jobs back, and they are scored by another, or by the process that is started in its
place: an answer costs far more to sample than to score. Everything about that is bounded. A job is given up once it was
lost with two workers, since it may be what ends them; a worker is given up after `LOSSES_PER_HOUR`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from penstock.actors.direct import SILENCE_S, Connection, connect
from penstock.actors.ray_errors import first_line, ray_boundary
from penstock.actors.reward import Result
from penstock.actors.silence import silence_limit
from penstock.dataflow.errors import PlacementError, TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ports import Score
from penstock.dataflow.trajectory import Task, Trajectory

logger = logging.getLogger(__name__)

LOSSES_PER_HOUR = 10
"""A worker that is lost more often than this is not started again."""
LOSSES_PER_JOB = 2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a lost worker is used again; doubled with each loss of the last hour."""
_HOUR_S = 3600.0
_OBITUARY_S = 10.0
"""How long a worker may take to say that it lives, or Ray how it died."""


@dataclass(slots=True, eq=False)
class _Job:
    """One trajectory to score.

    Attributes:
        label: What it is called in messages.
        body: The task and the trajectory, pickled once.
        is_sent: To the worker that has it.
        losses: Workers that were lost while they had it.
    """

    number: int
    label: str
    task_id: TaskId
    body: bytes
    answer: asyncio.Future[Score]
    is_sent: bool = False
    losses: int = 0


class _Worker:
    """One worker as the client sees it, through all the processes that it has.

    Consumes: jobs. Waits for: its messages. Unblocked by: each of them, the end of its process, or `SILENCE_S`.

    Attributes:
        is_up: It is not known to be lost. One that is not is being started again, unless `given_up` says why not.
    """

    def __init__(self, name: str, start: Callable[[], ActorHandle], give_back: Callable[[_Job], None]) -> None:
        """Start its process.

        Args:
            name: For messages.
            start: Starts a process.
            give_back: Takes the jobs that it has when it is lost.
        """
        self.name = name
        self.actor = start()
        self.is_up = True
        self.given_up: str | None = None
        self._start = start
        self._give_back = give_back
        self._jobs: dict[int, _Job] = {}
        self._outgoing: list[_Job] = []
        self._connection: Connection | None = None
        self._talk: asyncio.Task[None] | None = None
        self._losses: deque[float] = deque()
        self._lost_tasks: set[TaskId] = set()

    def submit(self, job: _Job) -> None:
        """Have it scored; its answer fails with a `TrajectoryError` if that cannot be."""
        self._jobs[job.number] = job
        self._outgoing.append(job)
        if len(self._outgoing) == 1:
            asyncio.get_running_loop().call_soon(self._flush)
        if self._talk is None:
            self._talk = asyncio.create_task(self._serve(), name=f"talk to {self.name}")

    def close(self) -> None:
        if self._talk is not None:
            self._talk.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _serve(self) -> None:
        """Talk to it, and to the processes that follow, until it is given up."""
        try:
            while self.given_up is None:
                broken = await self._conversation()
                self.is_up = False
                died = await self._how_it_died()
                self._count_loss((died or broken).rstrip("."))
                if self.given_up is None:
                    await self._recover(is_dead=died is not None)
        except Exception as error:  # noqa: BLE001  Ray itself is gone; its jobs must not wait forever
            self.given_up = f"{self.name} cannot be started again: {type(error).__name__}: {first_line(error)}"
            self._give_jobs_back(self.given_up)

    async def _conversation(self) -> str:
        """Send jobs and settle them by what comes back; returns what ended that."""
        try:
            async with silence_limit(SILENCE_S):
                address = await self.actor.listen.remote()
            self._connection = await connect(address, SILENCE_S)
            self.is_up = True
            self._flush()
            while True:
                for number, result in await self._connection.receive(SILENCE_S):
                    self._settle(number, result)
                self._lost_tasks.clear()
        except TimeoutError:
            return f"it did not answer for {SILENCE_S:.0f} s"
        except (ray.exceptions.RayError, EOFError, OSError) as error:
            return f"its connection broke: {first_line(error)}"
        except Exception as error:  # noqa: BLE001  whatever it sent: a score that never comes would be waited for
            return f"what it sent cannot be read: {type(error).__name__}: {first_line(error)}"
        finally:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    async def _how_it_died(self) -> str | None:
        """None if it lives."""
        try:
            async with silence_limit(_OBITUARY_S):
                await self.actor.is_alive.remote()
        except ray.exceptions.RayError as error:
            return first_line(error)
        except TimeoutError:
            return f"it did not answer for {_OBITUARY_S:.0f} s"
        return None

    def _count_loss(self, cause: str) -> None:
        """Give its jobs back, and itself up if this was one loss too many."""
        now = asyncio.get_running_loop().time()
        while self._losses and self._losses[0] < now - _HOUR_S:
            self._losses.popleft()
        self._losses.append(now)
        if len(self._losses) > LOSSES_PER_HOUR:
            self.given_up = (
                f"{self.name} was lost {len(self._losses)} times within an hour, more than {LOSSES_PER_HOUR}, and is "
                f"not started again; the last time: {cause}."
            )
        logger.warning(
            "%s with %d jobs is lost: %s. %s",
            *(self.name, len(self._jobs), cause),
            self.given_up or "It is started again, and they are scored again.",
        )
        self._give_jobs_back(cause)

    def _give_jobs_back(self, cause: str) -> None:
        """Have them scored elsewhere, but for those that were lost too often."""
        jobs, self._jobs, self._outgoing = list(self._jobs.values()), {}, []
        self._lost_tasks.update(job.task_id for job in jobs if job.is_sent)
        for job in jobs:
            job.losses += job.is_sent
            job.is_sent = False
            if job.losses < LOSSES_PER_JOB:
                self._give_back(job)
                continue
            what = f"{job.label}: reward workers were lost while they scored it, {job.losses} times; the last: {cause}"
            _fail(job, TrajectoryError("reward", what))

    async def _recover(self, *, is_dead: bool) -> None:
        """After a pause, start its process again if that is to blame: dead, or lost with two different tasks.

        A process that lives and was lost with one task is connected to again: the task may be the cause.
        """
        await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (len(self._losses) - 1), LONGEST_PAUSE_S))
        if is_dead or len(self._lost_tasks) > 1:
            ray.kill(self.actor)
            self.actor = self._start()
            self._lost_tasks.clear()

    def _flush(self) -> None:
        """Send the jobs of this tick together."""
        if self._connection is None or not self._outgoing:
            return
        jobs, self._outgoing = self._outgoing, []
        for job in jobs:
            job.is_sent = True
        self._connection.send([(job.number, job.label, job.body) for job in jobs])

    def _settle(self, number: int, result: Result) -> None:
        job = self._jobs.pop(number, None)
        if job is None:  # given back, and scored by another
            return
        if not isinstance(result, Score):
            _fail(job, result)
        elif not job.answer.done():  # else its trajectory was cancelled
            job.answer.set_result(result)


class RewardClient:
    """All reward workers as one `RewardWorker`, round-robin."""

    def __init__(self, starts: Sequence[Callable[[], ActorHandle]]) -> None:
        """Start the workers.

        Args:
            starts: Of each worker, what starts a process for it.
        """
        self._workers = [_Worker(f"reward worker {index}", start, self._submit) for index, start in enumerate(starts)]
        self._next_worker = itertools.cycle(self._workers)
        self._numbers = itertools.count()

    async def start(self, timeout_s: float) -> None:
        """Wait until every worker has its place and has loaded the reward.

        Raises:
            PlacementError: If the cluster cannot place one within the time limit, or one does not load.
        """
        try:
            with ray_boundary(PlacementError, "cluster: starting the reward workers"):
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*(worker.actor.start.remote() for worker in self._workers))
        except TimeoutError:
            raise PlacementError(
                f"cluster: {len(self._workers)} reward workers were not up within {timeout_s:.0f} s. Ray has "
                f"{ray.available_resources()} free of {ray.cluster_resources()}. Lower reward.num_workers, use "
                "another reward.pool, or raise rollout.start_timeout_s."
            ) from None

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Score one trajectory. The worker's own time-out bounds the wait, and what is said above.

        Raises:
            TrajectoryError: kind `reward`.
        """
        label = f"{trajectory.trajectory_id} ({task.task_id})"
        try:
            body = pickle.dumps((task, trajectory), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # user data: whatever its pickling raises is data
            raise TrajectoryError("reward", f"{label}: the task cannot be sent: {error!r}") from error
        answer: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._submit(_Job(next(self._numbers), label, task.task_id, body, answer))
        return await answer

    async def close(self, timeout_s: float = 2.0) -> None:
        for worker in self._workers:
            worker.close()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(worker.actor.shutdown.remote() for worker in self._workers))
        except (TimeoutError, ray.exceptions.RayError):
            pass

    def _submit(self, job: _Job) -> None:
        """Give it to the next worker that is up; while there is none, to one that is being started."""
        if job.answer.done():  # its trajectory was cancelled
            return
        chosen: _Worker | None = None
        for _ in self._workers:
            worker = next(self._next_worker)
            if worker.given_up is None and (worker.is_up or chosen is None):
                chosen = worker
            if worker.is_up:
                break
        if chosen is None:
            _fail(job, TrajectoryError("reward", f"no reward worker is left. {worker.given_up}"))
        else:
            chosen.submit(job)


def _fail(job: _Job, error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)
