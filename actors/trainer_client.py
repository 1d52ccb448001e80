"""The driver's side of the trainer ranks: all of them as one `TrainerGroup`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from penstock.actors.ray_errors import ray_boundary
from penstock.dataflow.errors import TrainingError
from penstock.dataflow.ports import StepReport, WeightManifest
from penstock.dataflow.trajectory import GroupRef
from penstock.trainer.batches.sequences import Example
from penstock.trainer.policy_trainer import TeacherForced


class TrainerClient:
    """All ranks as one trainer group.

    Attributes:
        node_id: Node of rank 0, where published versions are written.
    """

    def __init__(self, ranks: Sequence[ActorHandle], step_timeout_s: float) -> None:
        self._ranks = ranks
        self._step_timeout_s = step_timeout_s
        self.node_id = ""
        self.version = 0
        self.busy_s = 0.0

    async def start(self, timeout_s: float) -> None:
        host, port = await self._ranks[0].rendezvous.remote()
        nodes = await self._all("start", host, port, timeout_s=timeout_s)
        self.node_id = nodes[0]

    async def step(self, batch: AsyncIterator[GroupRef]) -> StepReport:
        """Train one batch; the version moves on unless the step was skipped."""
        groups = [group async for group in batch]
        handles, min_versions = [group.handle for group in groups], [group.min_version for group in groups]
        reports = await self._all("step", handles, self.version, min_versions)
        self.version = reports[0].version
        self.busy_s += reports[0].busy_s
        return reports[0]

    async def supervised_step(self, examples: Sequence[Example]) -> dict[str, float]:
        return (await self._all("supervised_step", examples))[0]

    async def teacher_forced(self, examples: Sequence[Example]) -> TeacherForced:
        measured: TeacherForced = (await self._all("teacher_forced", examples))[0]
        return measured

    async def export(self, version: int) -> WeightManifest:
        manifest = (await self._all("export", version))[0]
        assert manifest is not None, "rank 0 exports"
        return manifest

    def read_back(self, manifest: WeightManifest) -> ray.ObjectRef:
        """Handle of the version's bytes in the object store."""
        return self._ranks[0].read_back.remote(manifest)

    async def save(self, path: str) -> None:
        """Write the policy in Hugging Face form to `path`."""
        await self._all("save_hf", path)

    async def close(self, timeout_s: float = 2.0) -> None:
        with contextlib.suppress(TrainingError):  # its process is ended by the cluster either way
            await self._all("shutdown", timeout_s=timeout_s)

    async def _all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call every rank; the first failure fails the call, with its cause."""
        limit = timeout_s or self._step_timeout_s
        calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        try:
            with ray_boundary(TrainingError, f"trainer: {method}"):
                async with asyncio.timeout(limit):
                    return list(await asyncio.gather(*calls))
        except TimeoutError:
            raise TrainingError(
                f"trainer: {method} of {len(self._ranks)} ranks took longer than {limit:.0f} s. "
                "A rank hangs or the step is too large; raise trainer.step_timeout_s if it only is slow."
            ) from None
