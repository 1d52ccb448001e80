"""Frozen policies as Ray actors, and their client in the driver: logprobs of each group, as soon as it is ready.

Consumes: handles of stored groups. Waits for: a free worker. Unblocked by: its answer, its death, the time limit.

A worker that dies, hangs or raises is killed and started again within its `RestartBudget`, and the group is computed
again by the next free worker. A group fails after `MAX_LOSSES` workers were lost while computing it, since it may be
the cause. The run ends when all workers are given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle

from penstock.actors.cluster import Resources
from penstock.actors.ray_errors import answer_of, first_line
from penstock.actors.restart_budget import MAX_LOSSES, RESTARTS_PER_HOUR, RestartBudget
from penstock.actors.worker_log import keep_output
from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.models.frozen_policy import FrozenPolicy
from penstock.trainer.spec import FrozenPolicySpec

logger = logging.getLogger(__name__)

GROUP_TIMEOUT_S = 600.0
"""Longest wait for the logprobs of one group. They are one forward, which takes seconds, so a worker that has not
answered after ten minutes hangs."""
PING_TIMEOUT_S = 60.0
"""Longest wait for an idle worker to say that it is alive, seconds."""

_Result = TypeVar("_Result")


class FrozenPolicyActor:
    """A process around a frozen policy."""

    def __init__(self, spec: FrozenPolicySpec) -> None:
        keep_output("frozen-policies")
        torch.set_num_threads(spec.threads)
        self._policy = FrozenPolicy.load(
            spec.path,
            spec.model,
            spec.device,
            spec.max_tokens,
            spec.temperature,
            replays_routes=spec.replays_routes,
            offloads=spec.offloads,
        )

    def ready(self) -> None:
        """Answers once the policy is loaded, and as long as the process is alive."""

    def rest(self) -> None:
        """Give the memory of the device back until the next group; ordered with the groups."""
        if self._policy.offloaded is not None:
            self._policy.offloaded.rest()

    @ray.method(num_returns=2)
    def logprobs(self, payload: GroupPayload) -> tuple[NDArray[np.float32], int]:
        """The array, for the trainer, and its length, which the client waits for."""
        found = self._policy.logprobs(payload)
        return found, len(found)


class _WorkerLostError(PenstockError):
    """A worker died, raised, or did not answer in time."""

    was_computing = False


class _Worker:
    """One worker and its successive processes.

    Attributes:
        process: The newest process.
    """

    def __init__(self, name: str, start: Callable[[], ActorHandle]) -> None:
        self.name = name
        self.start = start
        self.process = start()
        self.budget = RestartBudget(RESTARTS_PER_HOUR)


class FrozenPolicyClient:
    """A frozen policy: groups go to the first free worker. Arrays stay in the object store; the driver holds handles.

    Invariant: a worker is in the queue of free workers, has one group, is being restarted, or is given up. Once all are
    given up, the queue holds None for all that wait.
    """

    def __init__(
        self,
        role: str,
        starts: Sequence[Callable[[], ActorHandle]],
        start_timeout_s: float,
        timeout_s: float = GROUP_TIMEOUT_S,
    ) -> None:
        """Start the workers.

        Args:
            role: The section that configures them: `reference` or `teacher`.
            starts: One function per worker that starts its process.
            start_timeout_s: Longest wait for a process to load the policy, seconds.
            timeout_s: Longest wait for the logprobs of one group, seconds.
        """
        self._role = role
        self._workers = [_Worker(f"{role} worker {index}", start) for index, start in enumerate(starts)]
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s
        self._num_left = len(self._workers)
        self._last_cause = ""
        self._jobs: set[asyncio.Task[Any]] = set()
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()
        self._rest_ends: asyncio.Event | None = None
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def start(self) -> None:
        """Wait until all workers have loaded the policy.

        Raises:
            PenstockError: If one does not. It is not tried again, because its configuration may be the cause.
        """
        hint = "Raise trainer.start_timeout_s if it only loads slowly."
        loading = asyncio.gather(*(worker.process.ready.remote() for worker in self._workers))
        await answer_of(loading, self._start_timeout_s, PenstockError, f"{self._role}: start", hint)

    async def logprobs(self, handle: ray.ObjectRef) -> ray.ObjectRef:
        """Handle of `[n] float32`: logprobs of the sampled tokens of the group behind `handle`.

        A worker has one group at a time. Other groups wait here, so that the time limit is that of one group.

        Raises:
            TrajectoryError: kind `reward`, if `MAX_LOSSES` workers were lost while computing the group.
            PenstockError: If no worker is left, or a worker reports an error that no restart mends.
        """
        num_losses = 0
        while True:
            worker = await self._free.get()
            if worker is None:
                self._free.put_nowait(None)
                num = len(self._workers)
                raise PenstockError(
                    f"{self._role}: no worker is left: {num} of {num} were given up (each is restarted at most "
                    f"{RESTARTS_PER_HOUR} times within an hour), so no group can become ready. The last cause: "
                    f"{self._last_cause}. Mend it (Ray's logs tell more; {self._role}.pool gives the workers other "
                    "devices), then continue with `penstock resume`."
                )
            try:
                # The worker is busy until it answers, even if the group of the caller is cancelled.
                return await asyncio.shield(self._in_background(self._compute(worker, handle)))
            except _WorkerLostError as lost:
                num_losses += lost.was_computing
                if num_losses == MAX_LOSSES:
                    failed = lost.__cause__
                    trace = failed.traceback_str if isinstance(failed, ray.exceptions.RayTaskError) else ""
                    what = f"{num_losses} workers were lost while computing the logprobs of the group"
                    raise TrajectoryError("reward", f"{trace}{self._role}: {what}; the last cause: {lost}") from None

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Within it no worker computes, and none has parameters on its device: the trainer has the memory."""
        self._rest_ends = rest_ends = asyncio.Event()
        try:
            await asyncio.gather(*map(self._rest, self._workers))
            yield
        finally:
            self._rest_ends = None
            rest_ends.set()

    async def _rest(self, worker: _Worker) -> None:
        """Have a worker rest. One that does not is ended, which frees its device too; its next group finds it so."""
        process = worker.process
        try:
            await answer_of(process.rest.remote(), self._timeout_s, _WorkerLostError, f"{worker.name}: rest")
        except _WorkerLostError:
            ray.kill(process)

    def close(self) -> None:
        """Start no more processes, and wait for no more answers."""
        for job in self._jobs:
            job.cancel()

    def _in_background(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        job = asyncio.create_task(work, name=self._role)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    async def _compute(self, worker: _Worker, handle: ray.ObjectRef) -> ray.ObjectRef:
        """Have a free worker compute one group. It is free again afterwards, or is restarted if it was lost.

        Raises:
            _WorkerLostError: With the cause.
            PenstockError: If the policy itself raised it: a mistake of the configuration or the code.
        """
        ping, computing = f"{worker.name}, while it was idle", f"{worker.name}: logprobs"
        was_computing = False
        try:
            # A worker that was lost while it was idle is found here, so no group is blamed for it.
            await answer_of(worker.process.ready.remote(), PING_TIMEOUT_S, _WorkerLostError, ping)
            if self._rest_ends is not None:
                await self._rest_ends.wait()
            was_computing = True
            found, length = worker.process.logprobs.remote(handle)
            hint = (
                "If it is only slow, lower dataflow.group_size or rollout.sampling.max_new_tokens, or move it to GPUs "
                f"with {self._role}.pool."
            )
            await answer_of(length, self._timeout_s, _WorkerLostError, computing, hint)
        except _WorkerLostError as lost:
            failed = lost.__cause__
            if isinstance(failed, ray.exceptions.RayTaskError) and isinstance(failed.cause, PenstockError):
                self._free.put_nowait(worker)
                raise PenstockError(str(lost)) from failed
            lost.was_computing = was_computing
            self._in_background(self._restart(worker, lost))
            raise
        self._free.put_nowait(worker)
        return found

    async def _restart(self, worker: _Worker, cause: Exception) -> None:
        """Start a lost worker again until it is ready, or give it up when its budget is used up.

        All exceptions are caught, so that groups that wait always learn that no worker is left.
        """
        try:
            has_served = True
            while True:
                ray.kill(worker.process)
                pause_s = worker.budget.take(has_served=has_served)
                if pause_s is None:
                    break
                logger.warning("%s is lost and started again (%s): %s", worker.name, worker.budget, first_line(cause))
                await asyncio.sleep(pause_s)
                worker.process = worker.start()
                try:
                    loading = worker.process.ready.remote()
                    await answer_of(loading, self._start_timeout_s, _WorkerLostError, f"{worker.name}: start")
                except _WorkerLostError as error:
                    cause, has_served = error, False
                else:
                    self._free.put_nowait(worker)
                    return
        except Exception as error:  # noqa: BLE001 - Ray has ended, or the operating system starts no process
            cause = error
        logger.warning("%s was lost after %s and is given up: %s", worker.name, worker.budget, first_line(cause))
        self._num_left -= 1
        self._last_cause = first_line(cause).rstrip(".")
        if not self._num_left:
            self._free.put_nowait(None)


async def start_frozen_policies(
    role: str,
    spec: FrozenPolicySpec,
    resources: Sequence[Resources],
    environment: Mapping[str, str],
    start_timeout_s: float,
) -> FrozenPolicyClient:
    """Start the processes with a frozen policy."""

    def starting(need: Resources) -> Callable[[], ActorHandle]:
        actor = ray.remote(FrozenPolicyActor)
        return lambda: actor.options(**need.options(environment)).remote(spec)  # its node may be lost meanwhile

    client = FrozenPolicyClient(role, [starting(need) for need in resources], start_timeout_s)
    await client.start()
    return client
