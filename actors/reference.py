"""Frozen policies as Ray actors, and their client in the driver: logprobs of each group, as soon as it is ready.

Consumes: handles of stored groups. Waits for: a free worker. Unblocked by: its answer, its death, the time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle

from penstock.actors.cluster import Resources
from penstock.actors.ray_errors import answer_of
from penstock.dataflow.errors import PenstockError
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.models.frozen_policy import FrozenPolicy
from penstock.trainer.spec import ReferenceSpec

GROUP_TIMEOUT_S = 600.0
"""Longest wait for the logprobs of one group. They are one forward, which takes seconds, so a worker that has not
answered after ten minutes hangs."""


class ReferenceActor:
    """A process around a frozen policy."""

    def __init__(self, spec: ReferenceSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._policy = FrozenPolicy.load(spec.path, spec.model, spec.device, spec.max_tokens, spec.temperature)

    def ready(self) -> None:
        """Answers once the policy is loaded."""

    @ray.method(num_returns=2)
    def logprobs(self, payload: GroupPayload) -> tuple[NDArray[np.float32], int]:
        """The array, for the trainer, and its length, which the client waits for."""
        found = self._policy.logprobs(payload)
        return found, len(found)


class ReferenceClient:
    """`LogprobWorker`: groups go to the first free worker. Arrays stay in the object store; the driver holds handles.

    `role` is the section that configures it: `reference` or `teacher`.
    """

    def __init__(self, role: str, workers: Sequence[ActorHandle], timeout_s: float = GROUP_TIMEOUT_S) -> None:
        self._role = role
        self._workers = workers
        self._timeout_s = timeout_s
        self._free: asyncio.Queue[ActorHandle] = asyncio.Queue()
        for worker in workers:
            self._free.put_nowait(worker)

    async def start(self, timeout_s: float) -> None:
        await self._answer(asyncio.gather(*(worker.ready.remote() for worker in self._workers)), "start", timeout_s)

    async def logprobs(self, handle: ray.ObjectRef) -> ray.ObjectRef:
        """Handle of `[n] float32`: logprobs of the sampled tokens of the group behind `handle`.

        A worker has one group at a time. Other groups wait here, so that the time limit is that of one group.

        Raises:
            PenstockError: If the worker fails, dies or takes longer than the time limit.
        """
        worker = await self._free.get()
        found, length = worker.logprobs.remote(handle)
        computing = asyncio.ensure_future(length)
        # Freed only by the answer: the waiting task may be cancelled, but the worker is busy until it answers.
        computing.add_done_callback(lambda _computing: self._free.put_nowait(worker))
        await self._answer(asyncio.shield(computing), "logprobs", self._timeout_s)
        return found

    async def _answer(self, call: Awaitable[Any], what: str, limit_s: float) -> None:
        hint = (
            "The worker hangs or the group is too large. If it is only slow, lower dataflow.group_size or "
            f"rollout.sampling.max_new_tokens, or move it to GPUs with {self._role}.pool (for its start: raise "
            "trainer.start_timeout_s)."
        )
        await answer_of(call, limit_s, PenstockError, f"{self._role}: {what}", hint)


async def start_references(
    role: str,
    spec: ReferenceSpec,
    resources: Sequence[Resources],
    environment: Mapping[str, str],
    start_timeout_s: float,
) -> ReferenceClient:
    """Start the processes with a frozen policy."""
    workers = [ray.remote(ReferenceActor).options(**need.options(environment)).remote(spec) for need in resources]
    client = ReferenceClient(role, workers)
    await client.start(start_timeout_s)
    return client
