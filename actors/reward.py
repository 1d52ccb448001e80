"""Reward workers as Ray actors, and the driver's client that batches calls to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ports import Score
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.envs.scoring import RewardRunner

Job = tuple[Task, Trajectory]
MAX_JOBS_PER_CALL = 256


class RewardActor:
    """One reward worker; the user's code runs in a killable child process below it."""

    def __init__(self, fn_path: str, timeout_s: float) -> None:
        self._runner = RewardRunner(fn_path, timeout_s)

    async def score_many(self, jobs: list[Job]) -> list[Score | TrajectoryError]:
        return await self._runner.score_many(jobs)

    async def shutdown(self) -> None:
        await self._runner.shutdown()


class RewardClient:
    """All reward workers as one `RewardWorker`: jobs of one tick of the loop travel in one call, round-robin."""

    def __init__(self, workers: Sequence[ActorHandle]) -> None:
        self._workers = workers
        self._next_worker = itertools.cycle(workers)
        self._waiting: list[tuple[Job, asyncio.Future[Score]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Score one trajectory. The worker's own time-out bounds the wait.

        Raises:
            TrajectoryError: kind `reward`.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Score] = loop.create_future()
        self._waiting.append(((task, trajectory), answer))
        if len(self._waiting) == 1:
            loop.call_soon(self._flush)
        return await answer

    async def close(self, timeout_s: float = 2.0) -> None:
        for call in self._calls:
            call.cancel()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(worker.shutdown.remote() for worker in self._workers))
        except (TimeoutError, ray.exceptions.RayError):
            pass

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), MAX_JOBS_PER_CALL):
            call = asyncio.create_task(self._score_many(waiting[start : start + MAX_JOBS_PER_CALL]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _score_many(self, chunk: list[tuple[Job, asyncio.Future[Score]]]) -> None:
        worker = next(self._next_worker)
        try:
            results = await worker.score_many.remote([job for job, _ in chunk])
        except ray.exceptions.RayTaskError as error:  # not a trajectory's fault: the run stops with the cause
            for _, answer in chunk:
                if not answer.done():
                    answer.set_exception(error.cause)
            return
        except ray.exceptions.RayError as error:
            lost = TrajectoryError("reward", f"reward worker died: {str(error).splitlines()[0]}")
            results = [lost] * len(chunk)
        for (_, answer), result in zip(chunk, results, strict=True):
            if answer.done():  # its trajectory was cancelled
                continue
            if isinstance(result, TrajectoryError):
                answer.set_exception(result)
            else:
                answer.set_result(result)
