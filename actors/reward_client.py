"""The driver's side of the reward workers: all of them as one `RewardWorker`.

Ray places the workers and says how they died. Jobs and scores travel over a connection to each (direct.py), which is
made when the first job comes: until then the worker need not have its place.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from penstock.actors.direct import SILENCE_S, Connection, connect
from penstock.actors.ray_errors import ray_boundary
from penstock.actors.reward import Job, Result
from penstock.dataflow.errors import PlacementError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.dataflow.trajectory import Task, Trajectory

_OBITUARY_S = 10.0
"""How long Ray may take to say how a worker died."""


class _Worker:
    """One worker as the client sees it. Waits for its messages, and is unblocked by each, or by `SILENCE_S`."""

    def __init__(self, actor: ActorHandle) -> None:
        self.actor = actor
        self.lost: TrajectoryError | None = None
        self._answers: dict[int, asyncio.Future[Score]] = {}
        self._outgoing: list[Job] = []
        self._connection: Connection | None = None
        self._talk: asyncio.Task[None] | None = None

    def submit(self, number: int, task: Task, trajectory: Trajectory) -> asyncio.Future[Score]:
        """Have it scored; the future fails with a `TrajectoryError` if the worker is lost."""
        answer: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._outgoing.append((number, task, trajectory))
        if len(self._outgoing) == 1:
            asyncio.get_running_loop().call_soon(self._flush)
        if self._talk is None:
            self._talk = asyncio.create_task(self._listen())
        return answer

    def close(self) -> None:
        if self._talk is not None:
            self._talk.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _listen(self) -> None:
        """Until it is lost."""
        try:
            async with asyncio.timeout(SILENCE_S):
                address = await self.actor.listen.remote()
            self._connection = await connect(address, SILENCE_S)
            self._flush()
            while True:
                for number, result in await self._connection.receive(SILENCE_S):
                    self._settle(number, result)
        except ray.exceptions.RayError as error:
            self._lose(_first_line(error))
        except TimeoutError:
            self._lose(f"it did not answer for {SILENCE_S:.0f} s")
        except (EOFError, OSError) as error:
            self._lose(await self._how_it_died() or f"its connection broke: {_first_line(error)}")
        except Exception as error:  # noqa: BLE001  whatever it sent: nobody may wait for it for ever
            self._lose(f"what it sent cannot be read: {type(error).__name__}: {_first_line(error)}")

    def _flush(self) -> None:
        """Send the jobs of this tick together, or one by one if one of them cannot be sent."""
        if self._connection is None or not self._outgoing:
            return
        jobs, self._outgoing = self._outgoing, []
        try:
            self._connection.send(jobs)
        except Exception:  # noqa: BLE001  user data: whatever its pickling raises is data
            for job in jobs:
                self._send_alone(self._connection, job)

    def _send_alone(self, connection: Connection, job: Job) -> None:
        try:
            connection.send([job])
        except Exception as error:  # noqa: BLE001  as above
            number, task, trajectory = job
            what = f"{trajectory.trajectory_id} ({task.task_id}): the task cannot be sent: {error!r}"
            self._settle(number, TrajectoryError("reward", what))

    def _settle(self, number: int, result: Result) -> None:
        answer = self._answers.pop(number, None)
        if answer is None or answer.done():  # its trajectory was cancelled
            return
        if isinstance(result, Score):
            answer.set_result(result)
        else:
            answer.set_exception(result)

    def _lose(self, how: str) -> None:
        """Fail every pending job, now and later."""
        self.lost = TrajectoryError("reward", f"reward worker died: {how}")
        if self._connection is not None:
            self._connection.close()
        for number in list(self._answers):
            self._settle(number, self.lost)

    async def _how_it_died(self) -> str:
        """What Ray knows; empty if it knows nothing in time."""
        try:
            async with asyncio.timeout(_OBITUARY_S):
                await self.actor.is_alive.remote()
        except ray.exceptions.RayError as error:
            return _first_line(error)
        except TimeoutError:
            pass
        return ""


class RewardClient:
    """All reward workers as one `RewardWorker`, round-robin."""

    def __init__(self, actors: Sequence[ActorHandle]) -> None:
        self._workers = [_Worker(actor) for actor in actors]
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
        """Score one trajectory. The worker's own time-out bounds the wait.

        Raises:
            TrajectoryError: kind `reward`.
        """
        return await self._choose().submit(next(self._numbers), task, trajectory)

    async def close(self, timeout_s: float = 2.0) -> None:
        for worker in self._workers:
            worker.close()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(worker.actor.shutdown.remote() for worker in self._workers))
        except (TimeoutError, ray.exceptions.RayError):
            pass

    def _choose(self) -> _Worker:
        """The next living worker."""
        worker = next(self._next_worker)
        for _ in self._workers:
            if worker.lost is None:
                return worker
            worker = next(self._next_worker)
        assert worker.lost is not None, "none is alive"
        raise TrajectoryError(worker.lost.kind, worker.lost.detail)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
