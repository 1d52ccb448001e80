"""The driver's side of the reward workers: all of them as one `RewardWorker`.

Jobs of one tick of the loop travel in one call; scores come back by a long poll, so a slow trajectory holds nobody up.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from penstock.actors.ray_errors import ray_boundary
from penstock.actors.reward import Job, Result
from penstock.dataflow.errors import PlacementError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.dataflow.trajectory import Task, Trajectory

POLL_S = 20.0
SILENCE_S = 60.0
"""A poll that takes longer than this beyond its own wait means that the worker hangs."""


class _Worker:
    """One worker as the client sees it."""

    def __init__(self, actor: ActorHandle) -> None:
        self.actor = actor
        self.answers: dict[int, asyncio.Future[Score]] = {}
        self.outgoing: list[Job] = []
        self.lost: TrajectoryError | None = None
        self.is_polled = False

    def lose(self, error: Exception) -> None:
        """Fail every pending job, now and later."""
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        self.lost = TrajectoryError("reward", f"reward worker died: {first_line}")
        self.settle([(number, self.lost) for number in self.answers])

    def settle(self, results: Sequence[tuple[int, Result]]) -> None:
        for number, result in results:
            answer = self.answers.pop(number, None)
            if answer is None or answer.done():  # its trajectory was cancelled
                continue
            if isinstance(result, Score):
                answer.set_result(result)
            else:
                answer.set_exception(result)


class RewardClient:
    """All reward workers as one `RewardWorker`, round-robin."""

    def __init__(self, actors: Sequence[ActorHandle]) -> None:
        self._workers = [_Worker(actor) for actor in actors]
        self._next_worker = itertools.cycle(self._workers)
        self._numbers = itertools.count()
        self._calls: set[asyncio.Task[None]] = set()

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
        worker = self._choose()
        if not worker.is_polled:
            worker.is_polled = True
            self._spawn(self._collect(worker))
        number = next(self._numbers)
        answer: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        worker.answers[number] = answer
        worker.outgoing.append((number, task, trajectory))
        if len(worker.outgoing) == 1:
            asyncio.get_running_loop().call_soon(self._flush, worker)
        return await answer

    async def close(self, timeout_s: float = 2.0) -> None:
        for call in self._calls:
            call.cancel()
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

    def _flush(self, worker: _Worker) -> None:
        jobs, worker.outgoing = worker.outgoing, []
        self._spawn(self._submit(worker, jobs))

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _submit(self, worker: _Worker, jobs: list[Job]) -> None:
        try:
            await worker.actor.submit.remote(jobs)
        except ray.exceptions.RayError as error:
            worker.lose(error)

    async def _collect(self, worker: _Worker) -> None:
        while worker.lost is None:
            try:
                async with asyncio.timeout(POLL_S + SILENCE_S):
                    worker.settle(await worker.actor.collect.remote(POLL_S))
            except TimeoutError:
                worker.lose(TimeoutError(f"it did not answer for {POLL_S + SILENCE_S:.0f} s"))
            except ray.exceptions.RayError as error:
                worker.lose(error)
