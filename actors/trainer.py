"""The trainer ranks as Ray actors, and the driver's client that makes them one `TrainerGroup`.

Every rank receives the same handles and takes its own share by a pure function; collectives run
between the ranks themselves (gloo or NCCL), never through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from penstock.dataflow.errors import TrainingError
from penstock.dataflow.ports import GroupRef, StepReport, WeightManifest
from penstock.trainer.batches.sequences import Example
from penstock.trainer.build import build_trainer, save_policy
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.spec import TrainerSpec, free_port
from penstock.weights.transport.shared_memory import default_directory, write_version


@ray.remote
class TrainerRank:
    """One data-parallel rank in its own process."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._trainer: PolicyTrainer | None = None
        self._outbound: Path | None = None

    def rendezvous(self) -> tuple[str, int]:
        """Address and a free port of this rank's node: where the ranks meet (rank 0 only)."""
        return ray.util.get_node_ip_address(), free_port()

    def start(self, host: str, port: int) -> str:
        """Join the other ranks and load the policy; returns the node this rank runs on."""
        spec = self._spec
        self._trainer = build_trainer(
            spec.model_path,
            spec.model,
            spec.trainer,
            spec.algorithm,
            rank=self._rank,
            world_size=spec.trainer.num_ranks,
            master_addr=host,
            master_port=port,
            device=spec.device,
            threads=spec.threads,
            seed=spec.seed,
            temperature=spec.temperature,
            max_new_tokens=spec.max_new_tokens,
        )
        if self._rank == 0:
            self._outbound = Path(tempfile.mkdtemp(prefix="penstock-weights-", dir=default_directory()))
        return ray.get_runtime_context().get_node_id()

    def step(self, payloads: list[ray.ObjectRef], version: int) -> StepReport:
        return self._running().step(ray.get(payloads), version)

    def supervised_step(self, examples: list[Example]) -> dict[str, float]:
        return dict(self._running().supervised_step(examples))

    def teacher_forced_accuracy(self, examples: list[Example]) -> float:
        return self._running().teacher_forced_accuracy(examples)

    def export(self, version: int) -> WeightManifest | None:
        """Write this version for the engines; the one before it is no longer needed. Collective; rank 0 answers."""
        tensors = self._running().export_weights()
        if self._outbound is None:
            for _ in tensors:
                pass
            return None
        for old in self._outbound.iterdir():
            old.unlink()
        return write_version(tensors, version, self._spec.model.dtype, self._outbound)

    def read_back(self, manifest: WeightManifest) -> np.ndarray:
        """The version's file as bytes, for engines on other nodes (through the object store)."""
        return np.fromfile(manifest.location, dtype=np.uint8)

    def save_hf(self, path: str) -> None:
        """Write the policy and its tokenizer in Hugging Face form. Collective."""
        save_policy(self._running(), path, self._spec.model_path)

    def shutdown(self) -> None:
        """Leave the process group and free the shared memory."""
        if self._trainer is not None:
            self._trainer.close()
        if self._outbound is not None:
            shutil.rmtree(self._outbound, ignore_errors=True)

    def _running(self) -> PolicyTrainer:
        if self._trainer is None:
            raise TrainingError(f"trainer rank {self._rank}: not started")
        return self._trainer


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
        reports = await self._all("step", [group.handle for group in groups], self.version)
        self.version = reports[0].version
        self.busy_s += reports[0].busy_s
        return reports[0]

    async def supervised_step(self, examples: Sequence[Example]) -> dict[str, float]:
        return (await self._all("supervised_step", examples))[0]

    async def teacher_forced_accuracy(self, examples: Sequence[Example]) -> float:
        return (await self._all("teacher_forced_accuracy", examples))[0]

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

    async def close(self, timeout_s: float = 5.0) -> None:
        with contextlib.suppress(TrainingError):  # its process is ended by the cluster either way
            await self._all("shutdown", timeout_s=timeout_s)

    async def _all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call every rank; the first failure fails the call with its cause and names the rank."""
        limit = timeout_s or self._step_timeout_s
        calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        try:
            async with asyncio.timeout(limit):
                return list(await asyncio.gather(*calls))
        except TimeoutError:
            raise TrainingError(
                f"trainer: {method} of {len(self._ranks)} ranks took longer than {limit:.0f} s. "
                "A rank hangs or the step is too large; raise trainer.step_timeout_s if it only is slow."
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise TrainingError(f"trainer: {method} failed: {type(error.cause).__name__}: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            raise TrainingError(f"trainer: a rank died during {method}: {str(error).splitlines()[0]}") from error
