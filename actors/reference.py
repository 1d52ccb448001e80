"""Frozen policies as Ray actors, and the driver's side of them: logprobs of each group, as soon as it is ready.

Consumes: handles of stored groups. Waits for: a worker with room. Unblocked by: its answer, its death, the time limit.
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


class ReferenceActor:
    """A process around a frozen policy."""

    def __init__(self, spec: ReferenceSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._policy = FrozenPolicy.load(spec.path, spec.model, spec.device, spec.max_tokens, spec.temperature)

    def ready(self) -> None:
        """Answers once the policy is loaded."""

    @ray.method(num_returns=2)
    def logprobs(self, payload: GroupPayload) -> tuple[NDArray[np.float32], int]:
        """The array, for the trainer; its length, for who waits."""
        found = self._policy.logprobs(payload)
        return found, len(found)


class ReferenceClient:
    """`LogprobWorker`: groups go to the first free worker. Arrays stay in the object store; the driver holds handles.

    `role` is the section that configures it: `reference` or `teacher`.
    """

    def __init__(self, role: str, workers: Sequence[ActorHandle], timeout_s: float) -> None:
        self._role = role
        self._workers = workers
        self._timeout_s = timeout_s
        self._free: asyncio.Queue[ActorHandle] = asyncio.Queue()
        for worker in workers:
            self._free.put_nowait(worker)

    async def start(self, timeout_s: float) -> None:
        await self._answer(asyncio.gather(*(worker.ready.remote() for worker in self._workers)), "start", timeout_s)

    async def logprobs(self, handle: ray.ObjectRef) -> ray.ObjectRef:
        """Handle of `[n] float32`, of the sampled tokens of the group behind `handle`.

        A worker has one group at a time, and the others wait here, so that the time limit is that of one group.

        Raises:
            PenstockError: If the worker fails, dies or takes longer than the time limit.
        """
        worker = await self._free.get()
        found, length = worker.logprobs.remote(handle)
        computing = asyncio.ensure_future(length)
        # Not when this wait ends: the waiting task may be cancelled, and the worker is busy until it answers.
        computing.add_done_callback(lambda _computing: self._free.put_nowait(worker))
        await self._answer(asyncio.shield(computing), "logprobs", self._timeout_s)
        return found

    async def _answer(self, call: Awaitable[Any], what: str, limit_s: float) -> None:
        hint = (
            f"The worker hangs or the group is too large. Raise {self._role}.timeout_s if it only is slow (its start: "
            "trainer.start_timeout_s)."
        )
        await answer_of(call, limit_s, PenstockError, f"{self._role}: {what}", hint)


async def start_references(
    role: str,
    spec: ReferenceSpec,
    resources: Sequence[Resources],
    environment: Mapping[str, str],
    timeouts_s: tuple[float, float],
) -> ReferenceClient:
    """Start the processes with a frozen policy; `timeouts_s` are those of the start and of one group."""
    workers = [ray.remote(ReferenceActor).options(**need.options(environment)).remote(spec) for need in resources]
    client = ReferenceClient(role, workers, timeouts_s[1])
    await client.start(timeouts_s[0])
    return client
